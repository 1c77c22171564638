"""TRL's DPOTrainer: the reference model is in an engine without an optimizer, which ds_kfac leaves alone.

python -m ds_kfac run --module examples.integrations.trl_dpo
"""

from collections.abc import Sequence

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from examples.integrations import tiny


def pairs(count: int = 64) -> Dataset:
    """The right sum and a wrong one."""
    rows = [{"prompt": f"{i} + {i}", "chosen": f" = {2 * i}.", "rejected": f" = {3 * i + 1}."} for i in range(count)]
    return Dataset.from_list(rows)


def main(argv: Sequence[str] | None = None) -> DPOTrainer:
    options = tiny.options(argv)
    arguments = DPOConfig(
        output_dir=str(options.out),
        deepspeed=tiny.ds_config(options.deepspeed),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-4,
        logging_steps=1,
        save_steps=max(1, options.steps // 2),
        eval_strategy="steps",
        eval_steps=options.steps,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=tiny.ON_CPU,
    )
    trainer = DPOTrainer(
        model=tiny.model(),
        ref_model=tiny.model(),
        args=arguments,
        train_dataset=pairs(),
        eval_dataset=pairs(8),
        processing_class=tiny.tokenizer(),
    )
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    return trainer


if __name__ == "__main__":
    main()
