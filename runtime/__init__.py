"""See `moe_compiler.runtime`."""

if __name__ != "moe_compiler.runtime":
    raise ImportError(
        "this folder is the package 'moe_compiler.runtime'; "
        "install the project (pip install -e .) and import that name"
    )
