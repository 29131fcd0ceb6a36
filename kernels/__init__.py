"""Tensor operations of the engine, one a file: formula, Triton kernel, host wrapper, public call.

Every public function takes tensors of any device. CPU tensors run through our C++ library where it
is built and through plain torch elsewhere; CUDA tensors run through Triton where it is installed.
This package imports torch and triton only, and imports without triton.

NOTE: transformers probes for a package named `kernels` (Hugging Face's) and reads its version.
Below 0.18.2 it leaves ours alone; without a `__version__` it fails with InvalidVersion('N/A').
"""

__version__ = "0.1.0"
