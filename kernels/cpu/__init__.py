"""The operations in C++ for AVX-512 and AVX2, built by g++ on the machine that runs them."""
