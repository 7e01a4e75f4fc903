"""See `moe_compiler.codegen`."""

if __name__ != "moe_compiler.codegen":
    raise ImportError(
        "this folder is the package 'moe_compiler.codegen'; "
        "install the project (pip install -e .) and import that name"
    )
