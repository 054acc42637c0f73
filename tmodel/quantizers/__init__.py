"""Post-training quantization turns a dense checkpoint into a standard quantized one.

A method is one file of this folder and one line here.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tmodel.quantizers import awq, fp8, gptq, rtn, smoothquant, squeezellm
from tmodel.quantizers.method import Layer, Method, QuantizedLayer

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (rtn.METHOD, gptq.METHOD, awq.METHOD, squeezellm.METHOD, smoothquant.METHOD, fp8.METHOD)
    }
)

__all__ = ["METHODS", "Layer", "Method", "QuantizedLayer"]
