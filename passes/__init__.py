"""See `moe_compiler.passes`."""

if __name__ != "moe_compiler.passes":
    raise ImportError(
        "this folder is the package 'moe_compiler.passes'; "
        "install the project (pip install -e .) and import that name"
    )
