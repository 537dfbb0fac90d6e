"""The corpora that GPT-NeoX's prepare_data.py knows by name, and where each was published.

Many of these addresses are dead or contested by now, so nothing is downloaded: a file put into `<data-dir>/<name>/` by
any other way is used.
"""

GPT2_VOCAB = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json"
GPT2_MERGES = "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt"

_EAI = "http://eaidata.bmk.sh/data"
_EYE = "https://the-eye.eu/public/AI"
_PARTS = f"{_EYE}/pile_preliminary_components"

# name -> address of the raw data; {..} stands for numbered parts
SOURCES = {
    "arxiv": f"{_PARTS}/2020-09-08-arxiv-extracts-nofallback-until-2007-068.tar.gz",
    "books1": f"{_PARTS}/books1.tar.gz",
    "books3": f"{_PARTS}/books3.tar.gz",
    "c4": "https://huggingface.co/datasets/allenai/c4",
    "c4_openwebtext": "https://the-eye.eu/eleuther_staging/c4/realnewslike/c4-train.{00000..00511}-of-00512.json.gz",
    "enron": f"{_EAI}/enron_emails.jsonl.zst",
    "enwik8": "https://data.deepai.org/enwik8.zip",
    "europarl": f"{_PARTS}/EuroParliamentProceedings_1996_2011.jsonl.zst",
    "freelaw": f"{_PARTS}/FreeLaw_Opinions.jsonl.zst",
    "github": f"{_EAI}/github_small.jsonl.zst",
    "hackernews": f"{_PARTS}/hn.tar.gz",
    "nih": f"{_PARTS}/NIH_ExPORTER_awarded_grant_text.jsonl.zst",
    "openwebtext2": f"{_PARTS}/openwebtext2.jsonl.zst.tar",
    "pile": f"{_EYE}/pile/train/{{00..29}}.jsonl.zst",
    "pile_subset": f"{_EYE}/pile/train/00.jsonl.zst",
    "pubmed": f"{_PARTS}/PMC_extracts.tar.gz",
    "stackexchange": f"{_PARTS}/stackexchange_dataset.tar",
    "ubuntu_irc": f"{_PARTS}/ubuntu_irc_until_2020_9_1.jsonl.zst",
    "youtube_subtitles": f"{_PARTS}/yt_subs.jsonl.zst",
}
