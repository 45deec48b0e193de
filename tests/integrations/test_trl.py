"""TRL: with a radius of 0 a run is TRL's own, logs included; with another one the logs are those of the weights.

TRL needs the datasets package. CI installs both in a folder of their own, because nothing else here uses them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import steppe
from helpers.plain_loop import assert_same

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from steppe.integrations.transformers import FlatLoRACallback, SharpnessAwareMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, about what it will change
TEXT = "the steppe is vast and flat a wind goes over grass horses run far sky wide"
WORDS = TEXT.split()
LINES = [" ".join(WORDS[i * j % len(WORDS)] for j in range(3 + i % 5)) for i in range(1, 17)]
TIMES = ("runtime", "per_second", "time")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer() -> Any:
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate([*special.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def network(kind: str = "CausalLM") -> Any:
    """A tiny random Qwen, with dropout."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, attention_dropout=0.1,
    )  # fmt: skip
    return getattr(transformers, f"Qwen2For{kind}")(config)


def ordered(line: str) -> str:
    return " ".join(sorted(line.split()))


def parts(kind: str) -> dict[str, Any]:
    """Model and data for a kind of trainer."""
    pairs = {"chosen": LINES, "rejected": [ordered(line) for line in LINES]}
    if kind == "SFT":
        return {"model": network(), "train_dataset": {"text": LINES}}
    if kind == "DPO":
        prompts = [line.split()[0] for line in LINES]
        return {"model": network(), "ref_model": network(), "train_dataset": {"prompt": prompts, **pairs}}
    if kind == "Reward":
        return {"model": network("SequenceClassification"), "train_dataset": pairs}
    return {"model": network(), "reward_funcs": different_words, "train_dataset": {"prompt": LINES[:4]}}


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def train(kind: str, folder: Path, method: steppe.Method | None, **options: Any) -> Any:
    """Two steps or more of two micro-batches each; TRL's own trainer if there is no method."""
    trainer_class = getattr(trl, f"{kind}Trainer")
    given = {}
    if method is not None:
        trainer_class = type(f"Sharp{kind}", (Watched, SharpnessAwareMixin, trainer_class), {})
        given["method"] = method
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_steps=1,
        learning_rate=1e-2, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
        save_strategy="no", gradient_checkpointing=False, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    needed = parts(kind)
    needed["train_dataset"] = datasets.Dataset.from_dict(needed["train_dataset"])
    trainer = trainer_class(args=args, processing_class=tokenizer(), **needed, **given)
    trainer.train()
    return trainer


class Watched:
    """Notes what each pass computes its loss from."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["completion_ids" if "completion_ids" in inputs else "input_ids"].clone()
        seen.append((ids, next(model.parameters()).detach().clone()))
        return super().compute_loss(model, inputs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]


seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # not in the trainer: what it counts there is undone


def logs(trainer: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in e.items() if not any(t in k for t in TIMES)} for e in trainer.state.log_history]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_training_counts_and_logs_as_trl_does(kind: str, tmp_path):
    plain, zero, sam = (train(kind, tmp_path, method) for method in (None, steppe.SAM(0.0), steppe.SAM(0.05)))
    assert_same(zero.model, plain.model, tolerance=0)
    assert logs(zero) == logs(plain)
    first, expected = logs(sam)[0], logs(plain)[0]
    assert first.pop("grad_norm") != expected.pop("grad_norm")  # that of the direction
    assert first == expected and first["num_tokens"] > 0
    assert [e.get("num_tokens") for e in logs(sam)] == [e.get("num_tokens") for e in logs(plain)]
    assert sam.optimizer.optimizer.metrics["looks"] == 2


def test_flat_lora_is_a_callback_of_any_trainer(tmp_path):
    """Without noise a run is TRL's own; with noise the adapter differs, the frozen weights do not."""
    peft = pytest.importorskip("peft")
    models = []
    for sigma in (None, 0.0, 0.5):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        model = peft.get_peft_model(network(), config)
        args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", learning_rate=1e-2,
                             per_device_train_batch_size=4, num_train_epochs=1, save_strategy="no",
                             gradient_checkpointing=False, dataloader_pin_memory=False)  # fmt: skip
        data = datasets.Dataset.from_dict({"text": LINES})
        callbacks = [] if sigma is None else [FlatLoRACallback(sigma)]
        trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks).train()
        assert not [name for name, layer in model.named_modules() if "base_layer" in name and "forward" in vars(layer)]
        models.append(model.state_dict())
    plain, zero, noisy = models
    assert all(torch.equal(zero[name], plain[name]) for name in plain)
    assert {"lora" in name for name in plain if not torch.equal(noisy[name], plain[name])} == {True}


def test_grpo_generates_once_for_all_looks(tmp_path):
    options = {"num_generations": 2, "max_completion_length": 4, "num_iterations": 2, "beta": 0.0}
    plain, zero = (train("GRPO", tmp_path, method, **options) for method in (None, steppe.SAM(0.0)))
    assert_same(zero.model, plain.model, tolerance=0)
    assert logs(zero) == logs(plain)
    seen.clear()
    sam = train("GRPO", tmp_path, steppe.SAM(0.05), **options)
    assert sam.state.global_step == plain.state.global_step == len(seen) // 4
    for step in range(0, len(seen), 4):  # two micro-batches at the weights, and the same two elsewhere
        (one, at), (two, _), (again, elsewhere), (then, _) = seen[step : step + 4]
        assert torch.equal(one, again) and torch.equal(two, then) and not torch.equal(at, elsewhere)
    first, expected = logs(sam)[0], logs(plain)[0]
    assert first.pop("grad_norm") != expected.pop("grad_norm")
    assert first == expected
    with pytest.raises(RuntimeError, match="the first look of MSAM is away from the weights"):  # in its second step
        train("GRPO", tmp_path, steppe.MSAM(), **options)
