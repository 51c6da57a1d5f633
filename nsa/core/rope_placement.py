"""Whether RoPE rotates keys before or after φ compresses them: what `auto` means and what is refused. No torch."""

ROPE_COMPRESSED = ("auto", "before", "after")
CHANNEL_MIXING_PHIS = ("linear", "mlp")


def resolve_rope_compressed(phi: str, rope_compressed: str) -> str:
    """`auto` as `before` or `after`; anything else unchanged."""
    if rope_compressed != "auto":
        return rope_compressed
    return "after" if phi in CHANNEL_MIXING_PHIS else "before"


def broken_rope_rule(phi: str, rope_compressed: str) -> str | None:
    """Why this φ cannot compress keys that are rotated already; None if it can.

    A sum over tokens commutes with the rotation, also with a learned weight per place. A map across channels does not:
    what it makes of rotated keys depends on where in the document they stand.
    """
    if rope_compressed == "before" and phi in CHANNEL_MIXING_PHIS:
        return (
            f"nsa.rope_compressed (before) does not fit nsa.phi ({phi}): {phi} mixes channels, which does not commute "
            f"with the rotation, so scores would depend on absolute positions. Set nsa.rope_compressed=after or auto."
        )
    return None
