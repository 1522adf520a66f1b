"""Training by several processes (ranks) on one node, each with its share of every batch.

``launcher`` starts them through torchrun and says what became of all of them; ``world`` is how one
of them speaks with the others. Importing this package imports no torch.
"""
