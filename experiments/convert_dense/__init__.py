"""A dense model trained on text, converted to sparse attention, warmed up and healed: what each stage costs in loss."""
