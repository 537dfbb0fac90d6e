"""Evaluates a model in any parallel layout on lm-eval's tasks, during training and after it.

Only rank 0 runs lm-eval (https://github.com/EleutherAI/lm-evaluation-harness). All ranks compute the
log-probabilities and the text that lm-eval requests.

eval.py calls `run_evaluation(args, process)`. train.py adds the callback `InTraining` to the training loop.
"""

from megatron.evaluation.harness import evaluate
from megatron.evaluation.run import run_evaluation
from megatron.evaluation.training import InTraining
