"""Device code that steers the graph it runs in: conditional nodes, and both ends of a programmatic dependent launch.

`cudaGraphSetConditional` is declared extern; the driver resolves it when the module is loaded, so nothing is linked. A
kernel that calls it can only run inside a graph that owns the handle.
"""

from llvmlite import ir

from blinkpy.device.cuda.kernel_compiler import cgutils, intrinsic, types


@intrinsic
def set_condition(typingctx, handle, value):
    """Set the conditional node of `handle` (uint64) to `value` (uint32): a WHILE node repeats unless it is 0; a
    SWITCH node runs the body of this number, if it exists.
    """

    def codegen(context, builder, signature, arguments):
        signature_of_extern = ir.FunctionType(ir.VoidType(), [ir.IntType(64), ir.IntType(32)])
        extern = cgutils.get_or_insert_function(builder.module, signature_of_extern, "cudaGraphSetConditional")
        wanted = (types.uint64, types.uint32)
        builder.call(extern, [context.cast(builder, a, s, w) for a, s, w in zip(arguments, signature.args, wanted, strict=True)])
        return context.get_dummy_value()

    return types.void(handle, value), codegen


@intrinsic
def wait_for_predecessors(typingctx):
    """Wait until the kernels before this one in the graph are complete, and their writes are visible. Needed
    after a programmatic edge, where this kernel starts early; otherwise it returns immediately.
    """

    def codegen(context, builder, signature, arguments):
        builder.asm(ir.FunctionType(ir.VoidType(), []), "griddepcontrol.wait;", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def let_successors_begin(typingctx):
    """Kernels behind this one by a programmatic edge of the graph may begin."""

    def codegen(context, builder, signature, arguments):
        builder.asm(ir.FunctionType(ir.VoidType(), []), "griddepcontrol.launch_dependents;", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen
