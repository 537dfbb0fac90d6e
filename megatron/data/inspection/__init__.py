"""Shows and checks datasets: samples as text or HTML, statistics, and verification of full files."""
