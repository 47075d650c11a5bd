"""The table of operations on an NVIDIA GPU, in Triton and CUDA C++.

    machine.py     where tensors live
    driver.py      what the CUDA driver is asked for: devices, addresses, memory
    arrays.py      products.py experts.py attention.py recurrent.py pages.py sampling.py
                   the groups of the table: they check, then launch
    formats.py     matrices.py    weights, as kernels read them
    multiply.py few.py launch.py many.py   which kernel a product takes
    attend_native.py prompts.py   how attention of one token, and of prompts, is cut and launched
    paged.py       what attention is made of: kinds of rows, layers, a step's pages
    recurrent_layer.py            recurrent layers, and where their states and logs lie
    recurrent_rows.py recur_native.py   which kernel a recurrent layer takes
    sampler.py     drawing.py     what a generation counts, and how its tokens are drawn and told
    copies.py      pages to the host and back, beside the kernels
    steps.py       stage.py       whole steps as graphs, and what passes to and from them
    nvrtc.py       CUDA C++, compiled and launched
    kernels/ csrc/ what is launched, in Triton and in CUDA C++

Importing this imports torch and triton, so nobody does before a GPU is asked for.
"""

from __future__ import annotations

from quire.ops.cuda.attention import Attention
from quire.ops.cuda.experts import Experts
from quire.ops.cuda.machine import Machine
from quire.ops.cuda.pages import PageWork
from quire.ops.cuda.recurrent import RecurrentLayers
from quire.ops.cuda.sampling import Sampling

__all__ = ["CudaOps", "Machine"]


class CudaOps(Experts, Attention, RecurrentLayers, PageWork, Sampling):
    """Operations on one GPU; `Machine(None)` runs its kernels in Triton's interpreter instead.

    Arrays are float32. What is multiplied has the type of the weight, or of K and V: 16 bits, and
    sums of float32. Results depend neither on the batch nor on how a prompt is cut, unless
    `exact_batches` is False.
    """

    @property
    def name(self) -> str:
        """The device, for people."""
        return self.machine.name

    @property
    def hopper(self) -> bool:
        """Whether quantised weights of prompts are multiplied as they are."""
        return self.machine.hopper

    @property
    def arithmetic(self) -> str:
        """The kind of GPU: the kernels' order of sums is fixed, that of its tensor cores is its."""
        return f"cuda {self.machine.architecture}{'' if self.exact_batches else ' fast'}"
