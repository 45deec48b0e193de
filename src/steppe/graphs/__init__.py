"""Records whole steps, and functions of tensors, as CUDA graphs, and replays them."""
