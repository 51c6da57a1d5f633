"""Quantised models and the trainers of TRL, with the packages themselves, which `.ci/nightly loaders` installs."""

from importlib.util import find_spec

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, QuantoConfig

import nsa.hf  # noqa: F401 (registers)
from tests.nsa.hf.tiny_model import byte_tokenizer, padded, tiny_model

pytestmark = pytest.mark.nightly  # needs packages that only `.ci/nightly loaders` installs
SIZES = dict(hidden_size=64, head_dim=16, v_head_dim=16, intermediate_size=128)  # multiples of the blocks of 4 bits


def torchao_config():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def needs(package, *values, **options):
    missing = pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
    return pytest.param(*values, marks=missing, **options)


QUANTISED = [
    needs(
        "bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), id="bitsandbytes 8 bit"
    ),
    needs("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True), id="bitsandbytes 4 bit"),
    needs("torchao", torchao_config, id="torchao"),
    needs("optimum", lambda: QuantoConfig(weights="int8"), id="quanto"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=257, eos_token_id=256, pad_token_id=256, **SIZES).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("config", QUANTISED)
def test_a_quantised_model_generates_the_tokens_that_it_has_without_a_cache(folder, config):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(), device_map="cpu")
    w_k = model.model.layers[0].attention.w_k
    assert type(w_k) is not torch.nn.Linear or type(w_k.weight) is not torch.nn.Parameter  # it is quantised
    ids, mask = padded([40, 11])
    ask = dict(attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, **ask), model.generate(ids, use_cache=False, **ask))


@pytest.mark.parametrize("config", QUANTISED)
def test_a_quantised_model_passes_gradients_to_what_is_trained(folder, config):
    """Two steps of the norms, below and above every quantised layer."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(), device_map="cpu").train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    norms = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, ids = torch.optim.SGD(norms, lr=1e-4), padded([40])[0]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        assert all(norm.grad is not None and norm.grad.isfinite().all() and norm.grad.any() for norm in norms)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("config", QUANTISED[:2])
def test_adapters_of_a_quantised_model_learn_and_generate(folder, config):
    """LoRA on weights of bitsandbytes, as peft prepares them."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(), device_map="cpu")
    model = peft.prepare_model_for_kbit_training(model)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))
    ids = padded([40])[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    ask = dict(attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    assert torch.equal(model.eval().generate(ids, **ask), model.generate(ids, use_cache=False, **ask))


PROMPTS = ["the cat sat on ", "once upon a time ", "a prompt ", "and another one "]
PAIRS = {"prompt": PROMPTS, "chosen": ["the mat"] * 4, "rejected": ["a dog"] * 4}
TRAINERS = {
    "SFT": {"text": [prompt + "the mat" for prompt in PROMPTS]},
    "DPO": PAIRS,
    "Reward": {name: [p + x for p, x in zip(PROMPTS, PAIRS[name], strict=True)] for name in ("chosen", "rejected")},
    "GRPO": {"prompt": PROMPTS},
    "RLOO": {"prompt": PROMPTS},
}


def rewards(completions, **_):
    return [float(len(set(text))) for text in completions]


@pytest.mark.parametrize("name", [needs("trl", name, id=name) for name in TRAINERS])
def test_the_trainers_of_trl_take_two_steps(folder, tmp_path, name):
    import trl

    generates = name in ("GRPO", "RLOO")
    auto = AutoModelForSequenceClassification if name == "Reward" else AutoModelForCausalLM
    model = auto.from_pretrained(folder, **({"num_labels": 1} if name == "Reward" else {}))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    arguments = getattr(trl, f"{name}Config")(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[], use_cpu=True,
        bf16=False, **({"num_generations": 2, "max_completion_length": 8} if generates else {}),
    )  # fmt: skip
    extra = {"reward_funcs": rewards} if generates else {}
    trainer = getattr(trl, f"{name}Trainer")(
        model=model, args=arguments, processing_class=byte_tokenizer(), train_dataset=Dataset.from_dict(TRAINERS[name]),
        **extra,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    after = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    assert any(not torch.equal(value, after[key]) for key, value in before.items())
