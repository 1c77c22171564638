"""TRL's DPOTrainer: the reference model is in an engine without an optimizer, which ds_kfac leaves
alone.

python -m ds_kfac run --module examples.integrations.trl_dpo
"""

from collections.abc import Sequence

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from examples.integrations import tiny


def pairs(count: int = 64) -> Dataset:
    """The right sum and a wrong one."""
    rows = [
        {"prompt": f"{i} + {i}", "chosen": f" = {2 * i}.", "rejected": f" = {3 * i + 1}."}
        for i in range(count)
    ]
    return Dataset.from_list(rows)


def main(argv: Sequence[str] | None = None) -> DPOTrainer:
    options = tiny.options(argv)
    arguments = DPOConfig(
        **tiny.arguments(options),
        deepspeed=tiny.ds_config(options.deepspeed),
        learning_rate=2e-4,
        max_length=32,
    )
    trainer = DPOTrainer(
        model=tiny.model(),
        ref_model=tiny.model(),
        args=arguments,
        train_dataset=pairs(),
        eval_dataset=pairs(8),
        processing_class=tiny.tokenizer(),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer


if __name__ == "__main__":
    main()
