"""Evaluation: tasks of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) on a model in any
layout, after training and during it. Only rank 0 knows lm-eval: it asks for log-probabilities and text, which
all ranks give.

`run_evaluation(args, process)` is what eval.py does; `InTraining` is the callback that train.py gives the
loop."""

from megatron.evaluation.harness import evaluate
from megatron.evaluation.run import run_evaluation
from megatron.evaluation.training import InTraining
