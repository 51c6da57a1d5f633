import pytest

from nsa.errors import CheckpointError
from nsa.model.transformer import NSATransformer

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from nsa.hf.weight_names import from_transformers, to_transformers


def test_every_parameter_is_renamed_and_comes_back():
    names = NSATransformer(20, 16, 2, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=8)
    ours = {name: name for name in names.state_dict()}
    theirs = to_transformers(ours)
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= theirs.keys()
    assert {"model.layers.1.attention.w_q.weight", "model.layers.0.feed_forward.w1.weight"} <= theirs.keys()
    assert from_transformers(theirs) == ours


@pytest.mark.parametrize("name", ["", "model", "optim.blocks.0", "xblocks.0.weight", "model.other.weight"])
def test_a_name_of_another_model_is_refused(name):
    for renamed in (to_transformers, from_transformers):
        with pytest.raises(CheckpointError, match="not a parameter"):
            renamed({name: 0})
