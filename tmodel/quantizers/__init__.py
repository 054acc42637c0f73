"""Post-training quantization turns a dense checkpoint into a standard quantized one.

A method is one file of this folder and one line here.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tmodel.quantizers import awq, gptq, rtn, squeezellm
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (rtn.METHOD, gptq.METHOD, awq.METHOD, squeezellm.METHOD)}
)

__all__ = ["METHODS", "Layer", "Method", "QuantizedLayer"]
