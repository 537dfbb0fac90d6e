"""Speed and memory beside other programs; `make bench` and `make gpu`, docs/benchmarks.md."""
