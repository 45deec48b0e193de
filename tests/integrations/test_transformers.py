"""transformers: a Trainer's run is the plain loop, for classification and for a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steppe
from helpers.plain_loop import METHODS, assert_same, plain_loop, windows_of
from helpers.problems import batchnorm_dropout, digits, seeded

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from steppe.integrations.flat_lora import FlatLoRA  # noqa: E402
from steppe.integrations.transformers import (  # noqa: E402
    FlatLoRACallback,
    SharpnessAwareMixin,
    SharpnessAwareTrainer,
)

ROOT = Path(__file__).parents[2]


class Classifier(nn.Module):
    """Digits, with BatchNorm and dropout, the way the Trainer wants a model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(batchnorm_dropout, dtype=torch.float32)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(x)
        return {"loss": F.cross_entropy(output, labels), "logits": output}


def images(count: int) -> list[dict[str, Tensor]]:
    x, y = digits(torch.float32)
    return [{"x": x[i], "labels": y[i]} for i in range(count)]


def language_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=128, n_positions=64, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def text() -> list[dict[str, Tensor]]:
    """Lines of the licence, character by character: each has another length, so micro-batches weigh differently."""
    lines = [line.strip() for line in (ROOT / "LICENSE").read_text(encoding="ascii").splitlines()]
    lines = [line for line in lines if len(line) > 20][:44]
    examples = []
    for line in lines:
        ids = torch.zeros(64, dtype=torch.long)
        labels = torch.full((64,), -100)
        codes = torch.tensor([ord(c) for c in line[:64]])
        ids[: len(codes)] = labels[: len(codes)] = codes
        labels[0] = -100  # nothing predicts it; versions of the Trainer differ in whether it counts
        examples.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})
    return examples


def arguments(folder: Path, **options: Any) -> Any:
    options = {"max_grad_norm": 0.5, "num_train_epochs": 1, "learning_rate": 0.05, "save_strategy": "no"} | options
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, optim="adamw_torch",
        train_sampling_strategy="sequential", dataloader_pin_memory=False, **options,
    )  # fmt: skip


def ours(trainer: Any) -> steppe.SharpnessAware:
    return trainer.optimizer.optimizer


def by_hand(model: Any, method: steppe.Method, windows: list, loss_of: Any, lr: float = 0.05, **options: Any) -> list:
    matrices = transformers.Trainer.get_decay_parameter_names(None, model)  # the Trainer's groups, and so its order
    trainable = [(name in matrices, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for is_matrix, p in trainable if is_matrix == wanted]} for wanted in (True, False)]
    base = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)
    optimizer = steppe.SharpnessAware(base, method, model=model)
    steps = len(windows)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
    model.train()
    return plain_loop(optimizer, windows, loss_of, scheduler=scheduler, waits=True, **options)


def batches_of(examples: list[dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    groups = windows_of(examples, size)
    return [{name: torch.stack([e[name] for e in group]) for name in group[0]} for group in groups]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_classification_is_the_plain_loop(name: str, accumulate: int, tmp_path):
    model, expected = Classifier(), Classifier()
    args = arguments(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=accumulate)
    trainer = SharpnessAwareTrainer(model, args, train_dataset=images(112), method=METHODS[name])
    random_state = Start()
    trainer.add_callback(random_state)
    trainer.train()
    torch.set_rng_state(random_state.state)
    windows = windows_of(batches_of(images(112), 16), accumulate)
    losses = by_hand(
        expected,
        METHODS[name],
        [[(batch, len(window)) for batch in window] for window in windows],
        lambda batch: expected(**batch[0])["loss"] / batch[1],
        clip=0.5,
    )
    assert_same(model, expected)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shares = [sum(part) for part in windows_of(losses, accumulate)]
    assert logged == pytest.approx(shares, rel=1e-3)  # the Trainer rounds to four digits
    assert ours(trainer).steps == trainer.state.global_step == len(windows)


@pytest.mark.parametrize("method", [steppe.MSAM(), steppe.SAMPa(), steppe.ARWP()], ids=lambda method: method.name)
def test_the_first_look_may_be_away_from_the_weights(method: steppe.Method, tmp_path):
    model, expected, start = Classifier(), Classifier(), Start()
    args = arguments(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    SharpnessAwareTrainer(model, args, train_dataset=images(64), method=method, callbacks=[start]).train()
    torch.set_rng_state(start.state)
    windows = [[(batch, 2) for batch in window] for window in windows_of(batches_of(images(64), 16), 2)]
    by_hand(expected, method, windows, lambda batch: expected(**batch[0])["loss"] / batch[1], clip=0.5)
    assert_same(model, expected)


class Start(transformers.TrainerCallback):
    """Remembers the random state that the first batch meets: the plain loop does not draw what the Trainer did."""

    state: Tensor

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.state = torch.get_rng_state()


def per_token(model: nn.Module, windows: list) -> tuple[list, Any]:
    """Each window with the number of tokens that it predicts, and a micro-batch's share of the loss."""

    def count(batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum()

    def loss_of(item: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        batch, tokens = item
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum") / tokens

    counted = [[(b, sum(count(b) for b in w)) for b in w] for w in windows]
    return counted, loss_of


def train_language_model(folder: Path, name: str, accumulate: int, model: Any, **options: Any) -> tuple[Any, Any]:
    args = arguments(folder, per_device_train_batch_size=4, gradient_accumulation_steps=accumulate, **options)
    trainer, start = SharpnessAwareTrainer(model, args, train_dataset=text(), method=METHODS[name]), Start()
    trainer.add_callback(start)
    trainer.train()
    return trainer, start


@pytest.mark.parametrize("name", ["SAM", "LookSAM", "CRSAM"])
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_language_model_with_uneven_token_counts_is_the_plain_loop(name: str, accumulate: int, tmp_path):
    model, expected = language_model(), language_model()
    _, start = train_language_model(tmp_path, name, accumulate, model, learning_rate=1e-3)
    windows, loss_of = per_token(expected, windows_of(batches_of(text(), 4), accumulate))
    assert len({int(tokens) for window in windows for _, tokens in window}) > 1
    torch.set_rng_state(start.state)
    by_hand(expected, METHODS[name], windows, loss_of, lr=1e-3, clip=0.5)
    assert_same(model, expected)


def test_bfloat16_is_the_plain_loop(tmp_path):
    model, expected = language_model(), language_model()
    _, start = train_language_model(tmp_path, "SAM", 3, model, learning_rate=1e-3, bf16=True)
    windows, loss_of = per_token(expected, windows_of(batches_of(text(), 4), 3))
    torch.set_rng_state(start.state)
    by_hand(expected, METHODS["SAM"], windows, loss_of, lr=1e-3, clip=0.5, autocast=torch.bfloat16)
    assert_same(model, expected)


class WithScaler(SharpnessAwareTrainer):
    """The Trainer uses no GradScaler on a CPU: give it one."""

    scale: float

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=self.scale), True


@pytest.mark.parametrize("scale", [2.0**10, 2.0**20])  # the second overflows at first: those steps are skipped
def test_half_precision_with_a_scaler_is_the_plain_loop(scale: float, tmp_path, monkeypatch):
    model, expected, start = Classifier(), Classifier(), Start()
    monkeypatch.setattr(WithScaler, "scale", scale, raising=False)
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, fp16=True)
    trainer = WithScaler(model, args, train_dataset=images(112), method=METHODS["CRSAM"], callbacks=[start])
    trainer.train()
    theirs = trainer.accelerator.scaler
    torch.set_rng_state(start.state)
    windows = [[(batch, len(window)) for batch in window] for window in windows_of(batches_of(images(112), 8), 2)]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    half = {"clip": 0.5, "scaler": scaler, "autocast": torch.float16}
    by_hand(expected, METHODS["CRSAM"], windows, lambda item: expected(**item[0])["loss"] / item[1], **half)
    assert theirs is not None and (theirs.get_scale() < scale) == (scale == 2.0**20)
    assert theirs.get_scale() == scaler.get_scale()
    assert_same(model, expected)


def test_resuming_is_not_having_stopped(tmp_path):
    whole, first, second = Classifier(), Classifier(), Classifier()
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    method, data = METHODS["LookSAM"], images(112)
    args = arguments(tmp_path / "a", **options)
    SharpnessAwareTrainer(whole, args, train_dataset=data, method=method).train()
    stop = [StopAt(3)]
    args = arguments(tmp_path / "b", save_strategy="steps", save_steps=3, **options)
    SharpnessAwareTrainer(first, args, train_dataset=data, method=method, callbacks=stop).train()
    trainer = SharpnessAwareTrainer(second, args, train_dataset=data, method=method)
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert ours(trainer).steps == 7
    assert_same(second, whole, tolerance=0)


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    model = language_model()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config)


def test_adapters_train_and_the_frozen_weights_stay(tmp_path):
    model, expected = adapted(), adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    _, start = train_language_model(tmp_path, "SAM", 3, model, learning_rate=1e-2)
    windows, loss_of = per_token(expected, windows_of(batches_of(text(), 4), 3))
    torch.set_rng_state(start.state)
    by_hand(expected, METHODS["SAM"], windows, loss_of, lr=1e-2, clip=0.5)
    assert_same(model, expected)
    assert before and all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    assert any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


def test_flat_lora_knows_how_long_training_is(tmp_path):
    model, expected, start = adapted(), adapted(), Start()
    args = arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3, learning_rate=1e-2)
    callbacks = [FlatLoRACallback(sigma=0.5), start]
    SharpnessAwareTrainer(model, args, train_dataset=text(), method=METHODS["SAM"], callbacks=callbacks).train()
    windows, loss_of = per_token(expected, windows_of(batches_of(text(), 4), 3))
    noise = FlatLoRA(expected, sigma=0.5)

    def with_progress(item: tuple[int, Any]) -> Tensor:
        noise.progress = item[0] / len(windows)
        return loss_of(item[1])

    torch.set_rng_state(start.state)
    numbered = [[(step, item) for item in window] for step, window in enumerate(windows)]
    by_hand(expected, METHODS["SAM"], numbered, with_progress, lr=1e-2, clip=0.5)
    noise.remove()
    assert_same(model, expected)
    assert not [layer for layer in model.modules() if "forward" in vars(layer)]


class OwnLoss(SharpnessAwareMixin, transformers.Trainer):
    """A Trainer of the user's, which takes the labels out of its inputs and counts its calls."""

    calls = 0

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        self.calls += 1
        labels = inputs.pop("labels")
        return F.cross_entropy(model.net(inputs["x"]), labels, label_smoothing=0.1)


def test_the_mixin_serves_any_trainer(tmp_path):
    model, expected, start = Classifier(), Classifier(), Start()
    args = arguments(tmp_path, per_device_train_batch_size=16)
    trainer = OwnLoss(model, args, train_dataset=images(64), method=METHODS["SAM"], callbacks=[start])
    trainer.train()
    assert trainer.calls == 4 and ours(trainer).metrics["looks"] == 2  # it counts what plain training counts
    torch.set_rng_state(start.state)
    by_hand(
        expected,
        METHODS["SAM"],
        [[batch] for batch in batches_of(images(64), 16)],
        lambda batch: F.cross_entropy(expected.net(batch["x"]), batch["labels"], label_smoothing=0.1),
        clip=0.5,
    )
    assert_same(model, expected)


def test_an_optimizer_that_is_wrapped_already_is_used(tmp_path):
    model, other = Classifier(), Classifier()
    args = arguments(tmp_path, per_device_train_batch_size=16)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = steppe.SharpnessAware(base, METHODS["SAM"], model=model)
    SharpnessAwareTrainer(model, args, train_dataset=images(64), optimizers=(optimizer, None)).train()
    base = torch.optim.SGD(other.parameters(), lr=0.05)
    trainer = SharpnessAwareTrainer(
        other, args, train_dataset=images(64), optimizers=(base, None), method=METHODS["SAM"]
    )
    trainer.train()
    assert optimizer.steps == ours(trainer).steps == 4
    assert_same(model, other, tolerance=0)


@pytest.mark.slow
def test_train_can_be_called_again_also_after_an_interruption(tmp_path):
    class Interrupt(transformers.TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    model = Classifier()
    args = arguments(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    trainer = SharpnessAwareTrainer(model, args, train_dataset=images(64), method=METHODS["SAM"])
    trainer.add_callback(Interrupt)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    for a, b in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # BatchNorm's statistics too: the step is undone
    for rounds in (1, 2):
        trainer.train()
        assert ours(trainer).steps == 4 * rounds
        assert ours(trainer).metrics["looks"] == 2


def test_what_cannot_be_right_says_so(tmp_path):
    model = Classifier()
    args = arguments(tmp_path, per_device_train_batch_size=16)
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = steppe.SharpnessAware(base, METHODS["SAM"], model=model)
    data = {"model": model, "args": args, "train_dataset": images(32)}
    with pytest.raises(RuntimeError, match="step\\(\\) needs a direction"):
        transformers.Trainer(**data, optimizers=(optimizer, None)).train()
    with pytest.raises(TypeError, match="either method= or"):
        SharpnessAwareTrainer(**data).train()
    with pytest.raises(TypeError, match="either method= or"):
        SharpnessAwareTrainer(**data, optimizers=(optimizer, None), method=METHODS["SAM"]).train()
    with pytest.raises(ValueError, match="local=True needs a model in Distributed"):
        SharpnessAwareTrainer(**data, method=METHODS["SAM"], local=True).train()
    with pytest.raises(RuntimeError, match="single examples"):
        SharpnessAwareTrainer(**data, method=steppe.SSAM()).train()


def test_a_trainer_that_generates_in_its_step_is_refused(tmp_path):
    """TRL's Online DPO: each look would see other completions."""

    class Generates(transformers.Trainer):
        __module__ = "trl.experimental.online_dpo"

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = model.net(torch.rand_like(inputs["x"])).square().mean()
            self.accelerator.backward(loss)
            return loss.detach()

    trainer_class = type("Sharp", (SharpnessAwareMixin, Generates), {})
    args = arguments(tmp_path, per_device_train_batch_size=16)
    with pytest.raises(RuntimeError, match="generates data in training_step"):
        trainer_class(Classifier(), args, train_dataset=images(32), method=METHODS["SAM"]).train()
