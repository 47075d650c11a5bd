"""What every operation means, in plain NumPy: the truth that kernels are tested against.

matrices, kv, attention, recurrent, experts, sampling     definitions
table/                                                    a device made of them: `ReferenceOps`
"""
