"""The model of any rank of any layout on fake CUDA: no GPU, no values, every shape, device and collective."""
