"""Kernels in Triton. They take what they are given: sizes are checked by who launches them.

No result depends on who else is in a batch, or on how tokens are cut into batches: sums have one
order, which the width of a row, a weight or a position decides.
"""

from triton import knobs

# Which products are added without rounding in between is part of a kernel's bits.
knobs.language.default_fp_fusion = True
