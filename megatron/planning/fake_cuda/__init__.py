"""A CUDA device without a GPU: real code runs on fake tensors, which have shapes but no values.

shim.py builds guard.cpp, which gives torch the device. devices.py: `torch.cuda` and process groups.
observer.py: records memory, collectives and mistakes. streams.py: which stream waits for which.
"""
