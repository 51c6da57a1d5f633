"""Sizes that follow from other sizes, for whoever builds a model and whoever only reckons with one. No torch."""

FFN_MULTIPLE = 64


def default_ffn_dim(dim: int) -> int:
    """8/3 of the model dim (as many parameters as a plain feed-forward of 4·dim), rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
