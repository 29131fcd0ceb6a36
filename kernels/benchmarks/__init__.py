"""A benchmark an operation, each printing the fraction of a limit measured in the same run.

They run what the public call would run on the device: Triton on a GPU, plain torch on the CPU
(the C++ library has `kernels.cpu.benchmark`, which measures limits closer to the metal).
"""
