"""What runs for the second projection of a squared-ReLU block, and for dense weights of float8."""

from torch import Tensor

from hf_sparse24.kernels import reference


def squared_relu(u: Tensor, gate: Tensor | None, keep_two: bool) -> Tensor:
    """relu(u)^2, or relu(gate)^2 * u; of each four only the two largest if `keep_two`.  Dense, for layers that have no such operator."""
    return reference.squared_relu(u, gate, keep_two).contiguous()


def squared_relu_linear(
    u: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    weight_columns: Tensor | None,
    bias: Tensor | None,
    keep_two: bool,
) -> Tensor:
    """h W^T + bias for h = relu(u)^2, or relu(gate)^2 * u; see `reference.squared_relu_linear`.

    `weight_columns` holds the weight once more, as (in_features, out_features), for kernels that read only some of its columns.
    """
    return reference.squared_relu_linear(u, gate, weight, weight_scale, bias, keep_two)


def linear_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias with a dense weight of float8; see `reference.linear_fp8`.  A kernel may round x to float8, too."""
    return reference.linear_fp8(x, weight, weight_scale, bias)
