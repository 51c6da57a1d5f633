"""`NSACacheLayer` answers what Transformers asks of a cache layer."""

import copy

import accelerate
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from nsa.errors import ConfigError
from nsa.hf.cache import NSACacheLayer, NSAStaticCacheLayer
from nsa.hf.configuration import LAYER_TYPE
from tests.nsa.hf.tiny_model import padded, prompts, tiny_model

MODEL = tiny_model()


def run(ids, cache, **options):
    with torch.no_grad():
        return MODEL(ids, past_key_values=cache, **options).logits


def whole(ids, **options):
    with torch.no_grad():
        return MODEL(ids, use_cache=False, **options).logits


def new_cache():
    return DynamicCache(config=MODEL.config)


def test_the_layer_type_registers_the_classes():
    """`_layer_type` is private to Transformers, and the only way to make caches of our own."""
    assert DYNAMIC_LAYER_TYPE_MAPPING[LAYER_TYPE] is NSACacheLayer
    assert STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] is NSAStaticCacheLayer


def test_length_is_counted_in_columns_and_the_batch_is_known_after_the_first_pass():
    cache, (ids, mask) = new_cache(), padded([30, 11])
    assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (0, -1, -1)
    run(ids, cache, attention_mask=mask)
    assert (cache.get_seq_length(), cache.batch_size) == (30, 2)
    assert cache.get_mask_sizes(5, 0) == (35, 0)
    assert cache.is_croppable
    assert not cache.is_compileable


@pytest.mark.parametrize("make", [DynamicCache, new_cache], ids=["without a config", "with one"])
def test_a_cache_grows_past_what_it_was_made_for(make):
    cache, ids = make(), prompts(2, 300)
    parts = [run(part, cache) for part in ids.split([10, 1, 1, 150, 1, 137], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole(ids), atol=1e-3, rtol=1e-4)


def test_a_reserved_length_is_allocated_once():
    cache, ids = new_cache(), prompts(1, 50)
    cache.layers[0].reserve(50)
    run(ids[:, :20], cache)
    first = cache.layers[0]._cache
    run(ids[:, 20:], cache)
    assert cache.layers[0]._cache is first
    assert first.max_len == 50


@pytest.mark.parametrize("crop", [-7, 33], ids=["remove", "keep"])
def test_cropped_columns_are_forgotten_in_every_row(crop):
    """The last pass has padding on both sides: what is removed of a row is its real tokens among the columns."""
    cache, (ids, mask) = new_cache(), padded([30, 11])
    cache.activate_past_recording()
    more, more_mask = prompts(2, 10, seed=5), torch.ones(2, 10, dtype=torch.int64)
    more_mask[0, 6:] = 0
    more_mask[1, 1] = 0
    run(ids, cache, attention_mask=mask)
    run(more, cache, attention_mask=torch.cat([mask, more_mask], 1))
    cache.crop(crop)
    assert cache.get_seq_length() == 33
    last = prompts(2, 8, seed=6)
    all_ids = torch.cat([ids, more[:, :3], last], 1)
    all_mask = torch.cat([mask, more_mask[:, :3], torch.ones_like(last)], 1)
    got = run(last, cache, attention_mask=all_mask)
    torch.testing.assert_close(got, whole(all_ids, attention_mask=all_mask)[:, 33:], atol=1e-3, rtol=1e-4)


def test_recording_can_begin_with_tokens_in_the_cache_and_reaches_back_to_there():
    cache, ids = new_cache(), prompts(1, 200)
    run(ids[:, :90], cache)
    cache.activate_past_recording()
    for _ in range(4):
        run(prompts(1, 80, seed=9), cache)
        cache.crop(-80)
        cache.crop(0)
    got = run(ids[:, 90:], cache)
    torch.testing.assert_close(got, whole(ids)[:, 90:], atol=1e-3, rtol=1e-4)


def test_without_recording_a_full_ring_is_not_cropped():
    cache = new_cache()
    run(prompts(1, 90), cache)
    with pytest.raises(ConfigError, match="cannot be cropped"):
        cache.crop(-3)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), [2, 2, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ],
    ids=["reorder", "repeat", "select", "mask"],
)
def test_reordered_rows_continue_their_sequences(change, rows):
    cache, (ids, mask) = new_cache(), padded([40, 13, 26])
    run(ids, cache, attention_mask=mask)
    run(prompts(3, 1, seed=4), cache)
    change(cache)
    ids, mask = torch.cat([ids, prompts(3, 1, seed=4)], 1)[rows], torch.nn.functional.pad(mask, (0, 1), value=1)[rows]
    new = prompts(len(rows), 3, seed=8)
    all_ids, all_mask = torch.cat([ids, new], 1), torch.nn.functional.pad(mask, (0, 3), value=1)
    got = run(new, cache, attention_mask=all_mask)
    torch.testing.assert_close(got, whole(all_ids, attention_mask=all_mask)[:, -3:], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("crop", "left"), [(-7, 33), (-12, 28)], ids=str)
def test_cropping_reordered_rows_removes_their_own_tokens(crop, left):
    cache, (ids, mask) = new_cache(), padded([40, 13, 35])
    cache.activate_past_recording()
    run(ids, cache, attention_mask=mask)
    cache.reorder_cache(torch.tensor([1, 0, 0]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    ids, mask = padded([40, 13])
    cache.crop(crop)
    ids, mask, new = ids[:, :left], mask[:, :left], prompts(2, 3, seed=8)
    all_ids, all_mask = torch.cat([ids, new], 1), torch.nn.functional.pad(mask, (0, 3), value=1)
    got = run(new, cache, attention_mask=all_mask)
    torch.testing.assert_close(got, whole(all_ids, attention_mask=all_mask)[:, -3:], atol=1e-3, rtol=1e-4)


def test_a_copy_is_independent_and_a_reset_cache_equals_a_new_one():
    cache, ids = new_cache(), prompts(2, 60)
    run(ids[:, :40], cache)
    twin = copy.deepcopy(cache)
    run(prompts(2, 9, seed=3), cache)
    torch.testing.assert_close(run(ids[:, 40:], twin), whole(ids)[:, 40:], atol=1e-3, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(run(ids, cache), whole(ids), atol=1e-3, rtol=1e-4)


def test_a_static_cache_holds_what_it_was_made_for():
    cache, ids = StaticCache(config=MODEL.config, max_cache_len=40), prompts(1, 41)
    assert cache.get_max_length() == 40
    torch.testing.assert_close(run(ids[:, :40], cache), whole(ids)[:, :40], atol=1e-3, rtol=1e-4)
    with pytest.raises(ConfigError, match="max_cache_len"):
        run(ids[:, 40:], cache)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicCache(config=LlamaConfig(num_hidden_layers=2)),
        lambda: DynamicCache(config=tiny_model(num_hidden_layers=3).config),
        lambda: DynamicCache(config=MODEL.config, offloading=True),
    ],
    ids=["of a Llama", "of more layers", "offloaded"],
)
def test_caches_that_do_not_fit_are_refused(make):
    with pytest.raises(ConfigError, match="cache"):
        run(prompts(1, 5), make())


def test_keys_and_values_of_other_attention_are_refused():
    with pytest.raises(ConfigError, match="past_key_values"):
        new_cache().update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)


def test_two_threads_cannot_share_a_cache():
    import threading

    cache, refused = new_cache(), []
    run(prompts(1, 4), cache)

    def other():
        try:
            run(prompts(1, 1), cache)
        except ConfigError as error:
            refused.append(error)

    with cache.layers[0]._cache.exclusive:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1


def _quantised_dynamically(model, folder):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def _offloaded_to_host(model, folder):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _offloaded_to_disk(model, folder):
    return accelerate.disk_offload(model, folder / "offloaded", execution_device=torch.device("cpu"))


def _mapped_to_disk(model, folder):
    model.save_pretrained(folder / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.layers": "disk"}
    return type(model).from_pretrained(folder / "model", device_map=places, offload_folder=folder / "offloaded")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("load", [_quantised_dynamically, _offloaded_to_host, _offloaded_to_disk, _mapped_to_disk])
def test_quantised_and_offloaded_models_generate_the_tokens_that_they_have_without_a_cache(tmp_path, load):
    """Device and dtype of a cache are those of the hidden states: the weights are packed or elsewhere. With
    `quantize_dynamic` only the first token is defined: it rounds by the largest number of all tokens of a pass."""
    model, (ids, mask) = load(tiny_model(phi="mlp"), tmp_path), padded([40, 11])
    ask = dict(attention_mask=mask, max_new_tokens=30, do_sample=False)
    if load is _quantised_dynamically:
        assert model.generate(ids, **ask).shape == (2, 70)
        ask["max_new_tokens"] = 1
    assert torch.equal(model.generate(ids, **ask), model.generate(ids, use_cache=False, **ask))


def test_a_cache_follows_the_dtype_of_the_hidden_states():
    """bitsandbytes holds weights as int8 or uint8; its own kernels compute the layer."""
    layer, x_BSD = tiny_model().model.layers[0].attention, torch.zeros(2, 3, 48, dtype=torch.bfloat16)
    layer.w_k.weight = torch.nn.Parameter(torch.zeros(10, 1, dtype=torch.uint8), requires_grad=False)
    assert layer.new_cache(2, 3, like=x_BSD).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="like="):
        layer.new_cache(2, 3)
