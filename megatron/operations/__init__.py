"""What is done with runs beside training them: jobs of a cluster and what they are doing, checkpoints on the
HuggingFace Hub, reports, and the numbers that a monitoring system reads.

`run_folder.py` reads what a run leaves in its folders, for all of them. Training does not import this
package; the entry script hands the loop its callbacks.
"""
