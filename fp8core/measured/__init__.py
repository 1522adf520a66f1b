"""What was measured on which GPU: times of layers, and whole models in FP8 beside bf16.

The tables are JSON files of this package, ``*.layers.json`` by `benchmarks/gemm_crossover.py` and
``*.models.json`` by `benchmarks/crossover.py`; each says on which card, when, and by what command.
"""

from fp8core.measured.layer_times import LayerTimes, layer_times
from fp8core.measured.model_speeds import ModelSpeeds, model_speeds, nearest_model
from fp8core.measured.tables import cards

__all__ = ["LayerTimes", "ModelSpeeds", "cards", "layer_times", "model_speeds", "nearest_model"]
