"""transformers' Trainer. Nothing here is about K-FAC: it is in the DeepSpeed config, and enabled by
the launcher.

python -m ds_kfac run --module examples.integrations.hf_trainer
"""

from collections.abc import Sequence

from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from examples.integrations import tiny


def main(argv: Sequence[str] | None = None) -> Trainer:
    options = tiny.options(argv)
    arguments = TrainingArguments(
        **tiny.arguments(options),
        deepspeed=tiny.ds_config(options.deepspeed),
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
    )
    trainer = Trainer(
        model=tiny.model(),
        args=arguments,
        train_dataset=tiny.tokens(),
        eval_dataset=tiny.tokens(16),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    return trainer


if __name__ == "__main__":
    main()
