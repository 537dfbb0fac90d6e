#!/bin/bash
# Prints what replaces a shell script of GPT-NeoX or of its fork; see retired.py. Slurm runs a copy of a script in
# another folder, so the path of the original is asked from scontrol.
name=${BASH_SOURCE[0]}
if [ -n "${SLURM_JOB_ID-}" ] && [ ! -L "$name" ]; then
    name=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
fi
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "$name")")/retired.py" --named "$name"
