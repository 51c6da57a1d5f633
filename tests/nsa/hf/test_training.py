"""Fine-tuning with Transformers' conventions: losses, accumulation, checkpointing, packed rows, Trainer, LoRA."""

import pytest
import torch
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from nsa.errors import ConfigError
from tests.nsa.hf.test_modeling import RENAMES, twin
from tests.nsa.hf.tiny_model import padded, prompts, tiny_model


def gradients(model, **batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_loss_and_gradients_are_those_of_the_trainers_model():
    """Transformers' labels are the tokens themselves; ours are shifted already."""
    model, ids = tiny_model(), prompts(2, 60)
    labels = ids.clone()
    labels[0, :10] = -100
    loss, got = gradients(model, input_ids=ids, labels=labels)
    other = twin(model)
    want = other.loss(ids, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100))
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    theirs = dict(other.named_parameters())
    for name, grad in got.items():
        old = next(prefix for prefix in RENAMES if name.startswith(prefix))
        torch.testing.assert_close(grad, theirs[RENAMES[old] + name.removeprefix(old)].grad, atol=1e-4, rtol=1e-4)


def test_loss_is_divided_by_the_items_of_all_accumulated_batches():
    model, ids = tiny_model(), prompts(8, 40)
    labels = ids.clone()
    labels[0, :35] = -100
    n_items = int((labels[:, 1:] != -100).sum())
    with torch.no_grad():
        whole = model(ids, labels=labels, num_items_in_batch=n_items).loss
        parts = [
            model(i, labels=j, num_items_in_batch=n_items).loss
            for i, j in zip(ids.split(1), labels.split(1), strict=True)
        ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("label", [-1, -101, 1 << 20])
def test_labels_that_are_no_tokens_are_refused(label):
    model, ids = tiny_model(), prompts(2, 40)
    labels = ids.clone()
    labels[1, 7] = label
    with pytest.raises(ConfigError):
        model(ids, labels=labels)
    with pytest.raises(ConfigError):
        model(ids, labels=ids, shift_labels=labels)
    assert model(ids, labels=labels.clamp(max=ids.max()), ignore_index=min(label, -1)).loss.isfinite()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("batch", ["plain", "padded", "packed"])
def test_checkpointing_leaves_gradients_bit_for_bit(batch, reentrant):
    model, (ids, mask) = tiny_model(phi="mlp"), padded([50, 21])
    inputs = {
        "plain": dict(input_ids=prompts(2, 50), labels=prompts(2, 50)),
        "padded": dict(input_ids=ids, attention_mask=mask, labels=ids),
        "packed": dict(input_ids=prompts(1, 50), labels=prompts(1, 50), cu_seq_lens_q=torch.tensor([0, 30, 50])),
    }[batch]
    model.train()
    want_loss, want = gradients(model, **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    got_loss, got = gradients(model, **inputs)
    assert torch.equal(got_loss, want_loss)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_packed_rows_are_separate_documents():
    model, lengths = tiny_model(), [33, 8, 51]
    documents = [{"input_ids": prompts(1, n, seed=n)[0].tolist()} for n in lengths]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(documents)
    assert batch["input_ids"].shape == (1, sum(lengths))
    with torch.no_grad():
        packed = model(**batch)
        assert packed.past_key_values is None
        alone = [model(torch.tensor([document["input_ids"]])).logits[0] for document in documents]
        torch.testing.assert_close(packed.logits[0], torch.cat(alone), atol=1e-4, rtol=1e-4)
        # The collator alone separates documents by positions: that would be ignored, so it is refused.
        batch = DataCollatorWithFlattening(return_tensors="pt")(documents)
        with pytest.raises(ConfigError, match="cu_seq_lens_q"):
            model(**batch)


class Rows(Dataset):
    def __init__(self, n: int) -> None:
        self.ids = prompts(n, 32, seed=7)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: 3 * (index % 8)] = -100  # rows with different numbers of labels
        return {"input_ids": self.ids[index], "labels": labels}


def trained(folder, batch: int, accumulate: int, model=None, **options):
    set_seed(0)
    model = tiny_model() if model is None else model
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        max_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(32))
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_gives_the_same_losses_however_batches_are_accumulated(tmp_path):
    trainer, whole = trained(tmp_path, 8, 1)
    assert trainer.model_accepts_loss_kwargs
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    _, parts = trained(tmp_path, 2, 4)
    assert parts == pytest.approx(whole, abs=1e-5, rel=1e-5)
    _, checkpointed = trained(tmp_path, 8, 1, gradient_checkpointing=True)
    assert checkpointed == pytest.approx(whole, abs=1e-6)


def test_evaluation_by_the_trainer(tmp_path):
    """Under no_grad a cache is made: the Trainer must not try to gather it."""
    trainer, _ = trained(tmp_path, 8, 1)
    metrics = trainer.evaluate(Rows(6))
    model, rows = trainer.model, Rows(6)
    with torch.no_grad():
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
        assert metrics["eval_loss"] == pytest.approx(float(model(**batch).loss), rel=1e-4)


@pytest.mark.parametrize("target", ["all-linear", ["w_q", "w_v"]], ids=str)
def test_lora_trains_saves_loads_and_merges(target, tmp_path):
    import peft

    base, ids = tiny_model(), prompts(2, 50)
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=target, r=4, lora_alpha=8, lora_dropout=0.0)
    model = peft.get_peft_model(base, settings)
    _, losses = trained(tmp_path / "run", 8, 1, model=model)
    assert losses[-1] < losses[0]
    model.eval()
    changed = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert changed
    assert all("lora_" in name for name in changed)
    with torch.no_grad():
        want = model(ids).logits
        assert not torch.allclose(want, tiny_model()(ids).logits, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    tokens = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, want)
        assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=12, do_sample=False), tokens)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, want, atol=1e-3, rtol=1e-3)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, merged(ids).logits)


class _Rows(Dataset):
    """Rows of one length, some of whose tokens have no label."""

    def __init__(self, rows: int, length: int) -> None:
        self.ids = prompts(rows, length)
        self.labels = self.ids.masked_fill(prompts(rows, length, seed=2) < 40, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


@pytest.mark.parametrize("layers", [["nsa"], ["merged"]], ids=str)
def test_the_selector_loss_means_the_same_for_any_accumulation(layers, tmp_path):
    """One step of Transformers' Trainer with SGD, so that weights differ from each other as the gradients do."""
    changes = []
    for passes in (1, 2, 4):
        model = tiny_model(attention=layers, phi="softmax", selector_loss=3.0, selector_loss_share=0.3).train()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        args = TrainingArguments(
            tmp_path, max_steps=1, per_device_train_batch_size=8 // passes, gradient_accumulation_steps=passes,
            optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Trainer(model=model, args=args, train_dataset=_Rows(8, 90)).train()
        changes.append({name: p.detach() - start[name] for name, p in model.named_parameters()})
    for name, want in changes[0].items():
        for other in changes[1:]:
            assert (other[name] - want).abs().max() <= 1e-5 * want.abs().max() + 1e-6, name
    assert any("phi_k" in name and change.abs().max() > 1e-4 for name, change in changes[0].items())
