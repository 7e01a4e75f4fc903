"""See `moe_compiler.templates`."""

if __name__ != "moe_compiler.templates":
    raise ImportError(
        "this folder is the package 'moe_compiler.templates'; "
        "install the project (pip install -e .) and import that name"
    )
