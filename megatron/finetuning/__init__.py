"""Fine-tunes a HuggingFace model on a file with one command: `python deepy.py finetune MODEL DATA`.

formats.py recognises the rows, rows.py writes them in one form, choices.py chooses what fits the machine,
config_file.py writes the configuration. The run itself is an ordinary one, of train.py.
"""
