"""FP8 arithmetic in PyTorch: casts, scales, histories and the figures of FP8 health."""
