"""TRL's GRPOTrainer: a model that was taught a little addition learns it from rewards. K-FAC is in
the JSON alone.

python -m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60 python
-m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60 --adamw
python -m ds_kfac run --num_accelerators 1 --module examples.integrations.trl_grpo --steps 60 --lora

The first two end with one plot of both, reward against steps, in runs/integrations: from 0.14 right
answers to 0.33 (mean of the last ten steps), AdamW to 0.23, each at the best of three rates, in a
minute of a core's time. With 128 answers a step in place of 512 nothing was learned in 40 steps.
"""

from collections.abc import Sequence

from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from ds_kfac.integrations.transformers import KFACCallback
from examples.integrations import tiny
from examples.integrations.addition import rewards, sums, taught
from examples.integrations.reward_plot import draw, keep

ANSWERS = 512
"""Of a rank and step."""
KFACADAMW = {"type": "KFACAdamW", "params": {"lr": 3e-4, "torch_adam": True}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    options = tiny.options(argv, flags=("--adamw", "--lora"))
    arguments = GRPOConfig(
        **tiny.arguments(options, evaluates=False),
        deepspeed=tiny.ds_config(
            options.deepspeed, optimizer=ADAMW if options.adamw else KFACADAMW
        ),
        learning_rate=(ADAMW if options.adamw else KFACADAMW)["params"]["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=2,
        per_device_train_batch_size=ANSWERS,
        num_generations=8,
        max_completion_length=4,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=taught(),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=sums(0, 4096),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        if options.lora
        else None,
    )
    KFACCallback.add_to(trainer)
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        name = ("adamw" if options.adamw else "kfacadamw") + ("_lora" if options.lora else "")
        keep(trainer, options.out / f"{name}_rewards.csv")
        draw(options.out)
    return trainer


if __name__ == "__main__":
    main()
