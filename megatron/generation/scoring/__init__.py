"""Log-probabilities of given texts, and files of them."""
