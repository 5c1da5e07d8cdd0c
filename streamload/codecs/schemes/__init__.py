"""One module a library's layouts: recognize, decode, encode."""
