"""The training loop: `train` goes from the first window to the last checkpoint.

It reads in the order in which things happen; each part is imported from the file that owns it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from model.llama import LLaMAConfig, LLaMAModel, num_parameters, training_bytes
from model.memory import require_memory
from pipeline.tokenbin import TokenBins, built
from trainer.batches import Batch, step_batches
from trainer.config import Config, ConfigError, micro_steps
from trainer.eval import unigram_entropy, validation_loss
from trainer.metrics import console_line, curve, flops_per_token, peak_flops
from trainer.optim import build_optimizer, learning_rate, set_learning_rate
from trainer.ranks import Ranks
from trainer.run import RunDirectory
from trainer.windows import WindowOrder, Windows, eval_windows

log = logging.getLogger(__name__)


def train(config: Config, ranks: Ranks, *, resume_anyway: bool = False) -> None:
    """Train the model of `config` on its bins, or go on from the run's newest checkpoint.

    All ranks call it with the same arguments. What a step computes depends on the step alone, so
    a run that was stopped and started again has the losses of one that never stopped.

    Raises:
        ConfigError, TokenBinError, WindowError, RunError, CheckpointError: something does not fit;
            the message names both sides.
    """
    plan = make_plan(config, ranks.world_size, ranks.device)
    num_steps, context = config.train.steps, config.data.context
    torch.manual_seed(config.train.seed)
    model = LLaMAModel(plan.llama).to(ranks.device)
    optimizer = build_optimizer(model, config.optim)
    run = RunDirectory(config, plan.order_facts, ranks, resume_anyway=resume_anyway)
    first_step = run.resume(model, optimizer)
    if first_step >= num_steps:
        log.info("%s: finished, %d of %d steps are done", run.path, first_step, num_steps)
        return
    forward = wrap(model, config, ranks)
    precision = autocast_dtype(config, ranks.device)
    step_targets = config.batch.global_windows * context
    step_flops = flops_per_token(plan.llama, context) * step_targets
    peak = peak_flops(ranks.device)
    if ranks.is_first:
        log.info("%s", plan.story(config, ranks, precision, first_step))

    def validate(step: int) -> float | None:
        if plan.val_bins is None:
            return None
        loss = validation_loss(
            model, plan.val_bins, plan.val_windows, context, config.batch.micro_windows, ranks
        )
        run.write({"kind": "eval", "step": step, "val_loss": loss})
        if ranks.is_first:
            log.info("step %6d/%d  validation loss %.4f", step, num_steps, loss)
        return loss

    if first_step == 0:
        validate(0)
    batches_of_steps = step_batches(
        plan.train_bins,
        plan.order,
        first_step=first_step,
        last_step=num_steps,
        rank=ranks.rank,
        world_size=ranks.world_size,
        micro_windows=config.batch.micro_windows,
        vocab_size=plan.llama.vocab_size,
        device=ranks.device,
    )
    val_loss: float | None = None
    training_s = 0.0
    started = time.perf_counter()
    for step, batches in enumerate(batches_of_steps, first_step):
        rate = learning_rate(config.optim, step, num_steps)
        set_learning_rate(optimizer, rate)
        loss = backward(forward, batches, step_targets, ranks, precision)
        norm = float(clip_grad_norm_(model.parameters(), config.optim.clip or float("inf")))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        seconds = time.perf_counter() - started
        training_s += seconds
        row = {
            "kind": "step",
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": rate,
            "tokens_per_s": step_targets / seconds,
            "mfu": step_flops / seconds / (peak * ranks.world_size) if peak else None,
            "position": step * config.batch.global_windows,
        }
        run.write(row)
        num_done = step + 1
        if ranks.is_first and (num_done % config.run.log_every == 0 or num_done == num_steps):
            seconds_left = training_s / (num_done - first_step) * (num_steps - num_done)
            log.info("%s", console_line(row, num_steps, seconds_left))
        if num_done % config.eval.every == 0 or num_done == num_steps:
            val_loss = validate(num_done)
        if num_done % config.checkpoint.every == 0 or num_done == num_steps:
            run.save(num_done, model, optimizer)
        started = time.perf_counter()
    if ranks.is_first:
        log.info("%s", closing_words(run, plan, val_loss))
    run.close()


# ------------------------------------------------------------------ one step


def backward(
    forward: torch.nn.Module,
    batches: Sequence[Batch],
    step_targets: int,
    ranks: Ranks,
    precision: torch.dtype | None,
) -> float:
    """Leave in `.grad` the gradient of the step's mean loss, and return that loss.

    The mean is over the targets of all micro-steps and ranks, so that neither the cut into
    micro-steps nor the number of ranks nor a mask (target -100) changes what a token weighs.

    Args:
        forward: the model, wrapped for more than one rank; called as (inputs, targets) -> loss.
        batches: this rank's micro-steps.
        step_targets: how many targets the step has over all ranks if none is masked.
        ranks: all of them.
        precision: of autocast, or None.
    """
    wide = torch.float32 if ranks.device.type == "mps" else torch.float64
    totals = torch.zeros(2, dtype=wide, device=ranks.device)  # loss sum, targets
    for number, batch in enumerate(batches, 1):
        is_last = number == len(batches)
        wrapped = isinstance(forward, DistributedDataParallel)
        with forward.no_sync() if wrapped and not is_last else nullcontext():
            with torch.autocast(ranks.device.type, precision, enabled=precision is not None):
                loss = forward(batch.inputs, batch.targets)
            # DDP divides by the number of ranks; the step divides by its targets.
            (loss * (batch.num_targets * ranks.world_size / step_targets)).backward()
        totals[0] += loss.detach().to(wide) * batch.num_targets
        totals[1] += batch.num_targets
    loss_sum, num_targets = ranks.sum(totals).tolist()
    if num_targets != step_targets:
        for parameter in forward.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(step_targets / max(1.0, num_targets))
    return loss_sum / max(1.0, num_targets)


def wrap(model: LLaMAModel, config: Config, ranks: Ranks) -> torch.nn.Module:
    """The model as the loop calls it: compiled where asked for, synchronised between ranks."""
    forward: torch.nn.Module = model
    compiles = config.train.compile
    if compiles == "on" or (compiles == "auto" and ranks.device.type == "cuda"):
        forward = cast(torch.nn.Module, torch.compile(model))
    if ranks.world_size > 1:
        forward = DistributedDataParallel(
            forward,
            device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_keep_buffers,
        )
    return forward


# The rotary tables are constants, so none are sent; newer torch has another name for that.
_is_new = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
_keep_buffers: dict[str, Any] = {"forward_sync_buffers" if _is_new else "broadcast_buffers": False}


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """bf16 or None: what `train.precision` means on this device."""
    precision = config.train.precision
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if precision == "bf16" else None


# ------------------------------------------------------------------ before and after


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run reads and trains: all checked, nothing allocated."""

    llama: LLaMAConfig
    train_bins: TokenBins
    val_bins: TokenBins | None
    val_windows: Windows
    order: WindowOrder
    num_micro_steps: int  # a rank's forward passes in one step

    @property
    def order_facts(self) -> dict[str, object]:
        """What the order of the data depends on."""
        receipts = self.train_bins.receipts
        return self.order.facts([(receipt.shard, receipt.sha256["bin"]) for receipt in receipts])

    def story(
        self, config: Config, ranks: Ranks, precision: torch.dtype | None, first_step: int
    ) -> str:
        """What is about to happen, for the person who started it."""
        step_tokens = config.batch.global_windows * config.data.context
        train_tokens = sum(self.train_bins.num_tokens)
        epochs = config.train.steps * step_tokens / train_tokens
        ranks_word = "rank" if ranks.world_size == 1 else "ranks"
        return "\n".join(
            [
                f"model  {num_parameters(self.llama):,} parameters, "
                f"vocabulary {self.llama.vocab_size:,}; "
                f"{ranks.device.type}, {'bf16' if precision else 'fp32'}",
                f"data   {train_tokens:,} train tokens in {len(self.train_bins.receipts)} bins, "
                f"{len(self.val_windows):,} validation windows",
                f"steps  {first_step} to {config.train.steps}, {epochs:.2f} epochs; each "
                f"{step_tokens:,} tokens: {ranks.world_size} {ranks_word} x "
                f"{self.num_micro_steps} micro-steps x {config.batch.micro_windows} windows x "
                f"{config.data.context}",
            ]
        )


def make_plan(config: Config, world_size: int, device: torch.device | None) -> Plan:
    """Open the bins and make sure that model, batch, ranks and data fit together.

    Args:
        config: of the run.
        world_size: the number of ranks.
        device: whose memory must hold the model; on the CPU all ranks share it. None does not ask.

    Raises:
        ConfigError, ModelConfigError, NotEnoughMemoryError, TokenBinError, WindowError: they do
            not fit; the message names both sides.
    """
    directory = Path(config.data.bins)
    train_bins = TokenBins(directory, "train", config.data.shards)
    val_bins = TokenBins(directory, "val") if built(directory, "val") else None
    if val_bins is not None and not sum(val_bins.num_tokens):
        val_bins = None
    vocab_size = config.model.vocab_size or train_bins.dataset.vocab_size
    if vocab_size < train_bins.dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab_size:,}, but the bins in {directory} need "
            f"{train_bins.dataset.vocab_size:,} embedding rows (largest id + 1): leave it out, or "
            f"set at least that"
        )
    llama = LLaMAConfig(**config.model.llama_fields(vocab_size))
    if device is not None:
        copies = world_size if device.type == "cpu" else 1
        what = f"training {num_parameters(llama):,} parameters on {world_size} ranks"
        require_memory(training_bytes(llama) * copies, device, what)
    order = WindowOrder(
        num_tokens=train_bins.num_tokens,
        context=config.data.context,
        global_windows=config.batch.global_windows,
        seed=config.data.seed,
    )
    for index in order.short_bins:
        log.warning(
            "%s: bin %s has %d tokens and so no window of %d",
            directory,
            train_bins.receipts[index].shard,
            train_bins.num_tokens[index],
            config.data.context + 1,
        )
    return Plan(
        llama=llama,
        train_bins=train_bins,
        val_bins=val_bins,
        val_windows=eval_windows(
            val_bins.num_tokens if val_bins else (), config.data.context, config.eval.windows
        ),
        order=order,
        num_micro_steps=micro_steps(config.batch, world_size),
    )


def closing_words(run: RunDirectory, plan: Plan, val_loss: float | None) -> str:
    """The loss curve and what the last validation loss is worth."""
    rows = run.rows("step")
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    words = f"loss {losses[0]:.4f} {curve(losses)} {losses[-1]:.4f}" if losses else "no loss"
    if num_bad := len(rows) - len(losses):
        words += f"\nthe loss was not finite in {num_bad} of {len(rows)} steps: the run has failed"
    if val_loss is None or plan.val_bins is None:
        return f"{words}\nno validation data: nothing to compare with"
    entropy = unigram_entropy(plan.val_bins)
    side = "below" if val_loss < entropy else "NOT below"
    run.write({"kind": "event", "step": run.step, "event": "end", "unigram_entropy": entropy})
    return (
        f"{words}\nvalidation loss {val_loss:.4f} nats a token, {side} the unigram entropy of its "
        f"data, {entropy:.4f}"
    )
