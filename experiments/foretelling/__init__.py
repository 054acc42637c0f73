"""The model of `tkernels.prediction` asked of whole registries: at marked points, beside published figures, and beside
what a GPU report measured.
"""
