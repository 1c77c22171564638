"""Lightning: the optimizer from configure_optimizers, its scheduler made with it.

deepspeed --module examples.integrations.lightning_module
"""

import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

import ds_kfac
from ds_kfac.integrations.lightning import KFACCallback
from examples.integrations import tiny


class Module(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.model, self.steps = tiny.model(), steps

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = ds_kfac.KFACAdamW(self.parameters(), lr=2e-3, torch_adam=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class OnCPU(DeepSpeedStrategy):
    """Lightning asks for GPUs, DeepSpeed does not."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self) -> None:
        pl.strategies.DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def main(argv: Sequence[str] | None = None) -> pl.Trainer:
    options = tiny.options(argv)
    config = tiny.ds_config(options.deepspeed, train_micro_batch_size_per_gpu=4)
    # Lightning has its own
    for name in ("optimizer", "gradient_clipping", "gradient_accumulation_steps"):
        config.pop(name)
    strategy = (OnCPU if tiny.ON_CPU else DeepSpeedStrategy)(config=config)
    half = max(1, options.steps // 2)
    saving = pl.callbacks.ModelCheckpoint(
        options.out, filename="{step}", every_n_train_steps=half, save_top_k=-1
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu" if tiny.ON_CPU else "gpu",
        devices=int(os.environ.get("LOCAL_SIZE", "1")),  # of the deepspeed launcher
        max_steps=options.steps,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        default_root_dir=options.out,
        callbacks=[KFACCallback(), saving],
        enable_progress_bar=False,
    )
    collate = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    loaders = [DataLoader(tiny.tokens(n), batch_size=4, collate_fn=collate) for n in (256, 16)]
    trainer.fit(Module(options.steps), *loaders, ckpt_path=options.resume, weights_only=False)
    return trainer


if __name__ == "__main__":
    main()
