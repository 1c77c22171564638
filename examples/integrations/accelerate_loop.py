"""A training loop of one's own on Accelerate, with the optimizer and a scheduler as objects.

deepspeed --module examples.integrations.accelerate_loop
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

import ds_kfac
from examples.integrations import tiny


def main(argv: Sequence[str] | None = None) -> tuple[Any, dict[str, float]]:
    """Returns the engine and what was logged last."""
    options = tiny.options(argv)
    PartialState(cpu=tiny.ON_CPU)
    config = tiny.ds_config(
        options.deepspeed, train_micro_batch_size_per_gpu=4, gradient_clipping=1.0
    )
    config.pop("optimizer")
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = tiny.model()
    optimizer = ds_kfac.KFACAdamW(model.parameters(), lr=2e-3, torch_adam=True)
    # Accelerate steps a scheduler once for each process
    steps = options.steps * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    collate = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    loader = DataLoader(tiny.tokens(), batch_size=4, collate_fn=collate)
    held_out = DataLoader(tiny.tokens(16), batch_size=4, collate_fn=collate)
    engine, optimizer, scheduler, loader, held_out = accelerator.prepare(
        model, optimizer, scheduler, loader, held_out
    )
    step, logged = 0, {}
    if options.resume:
        accelerator.load_state(str(options.resume))
        step = engine.global_steps
    while step < options.steps:
        for batch in accelerator.skip_first_batches(loader, 2 * step % len(loader)):
            with accelerator.accumulate(engine):
                loss = engine(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            logged = {
                "loss": float(loss),
                "lr": scheduler.get_last_lr()[0],
                **engine.kfac.log_line(),
            }
            accelerator.print({"step": step, **logged})
            if step == options.steps // 2:
                accelerator.save_state(str(options.out / f"step-{step}"))
            if step == options.steps:
                break
    engine.eval()
    with torch.no_grad():
        losses = [accelerator.gather(engine(**batch).loss.reshape(1)).mean() for batch in held_out]
    return engine, logged | {"eval_loss": float(torch.stack(losses).mean())}


if __name__ == "__main__":
    main()
