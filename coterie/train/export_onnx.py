"""A client's model as ONNX: one input per column, with preprocessing and link inside the graph."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coterie._core import extras, files
from coterie._core.errors import SettingError
from coterie.data.preprocess import RAW, OneHot
from coterie.models.predictor import LinearPredictor

if TYPE_CHECKING:
    from coterie.data.preprocess import OneHot
    from coterie.train.exported_model import ExportedModel

OPSET, ML_OPSET, IR = 18, 3, 10
ROWS = "rows"


def to_onnx(one: ExportedModel, path: Path) -> None:
    """Write the model as an ONNX graph.

    Numbers are double [rows, 1] (NaN: missing) and texts string [rows, 1] ("": missing).

    Parameters
    ----------
    one
        The model of a client.
    path
        The file to write.
    """
    extras.require("export", "exporting to onnx")
    import onnx

    model = _Graph(one).build()
    onnx.checker.check_model(model, full_check=True)
    files.write_with(path, lambda temporary: onnx.save_model(model, str(temporary)))


class _Graph:
    """Nodes and constants of the graph, put together column by column."""

    def __init__(self, one: ExportedModel) -> None:
        self.one = one
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def build(self) -> Any:
        from onnx import TensorProto, helper

        one = self.one
        double = one.weights.dtype == torch.float64
        kind = TensorProto.DOUBLE if double else TensorProto.FLOAT
        features = self._columns() if one.preprocessor is not None else self._features(kind)
        if one.preprocessor is not None and not double:
            features = self._node("Cast", [features], to=kind)
        predictions = self._predictions(features)
        outputs = self._outputs(predictions, kind)
        graph = helper.make_graph(self.nodes, "coterie", self.inputs, outputs, self.constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="coterie")
        note = {**one.note(), "numbers": one.numbers, "texts": one.texts}
        helper.set_model_props(model, {"coterie": json.dumps(note)})
        return model

    def _features(self, kind: int) -> str:
        from onnx import helper

        shape = getattr(self.one.model, "features", self.one.features)
        rest = list(shape) if isinstance(shape, tuple) else [shape]
        self.inputs.append(helper.make_tensor_value_info("x", kind, [ROWS, *rest]))
        return "x"

    def _columns(self) -> str:
        """Add an input for each column of the table, encode them and put them side by side."""
        from onnx import TensorProto, helper

        preprocessor = self.one.preprocessor
        assert preprocessor is not None
        parts = []
        for scale in preprocessor.scales:
            self.inputs.append(helper.make_tensor_value_info(scale.name, TensorProto.DOUBLE, [ROWS, 1]))
            if preprocessor.encoding == RAW:
                parts.append(scale.name)
                continue
            gap = self._node("IsNaN", [scale.name])
            if scale.sd:
                centred = self._node("Sub", [scale.name, self._constant(scale.mean)])
                scaled = self._node("Div", [centred, self._constant(scale.sd)])
                if scale.limit:
                    far = self._node("Greater", [self._node("Abs", [scaled]), self._constant(scale.limit)])
                    scaled = self._node("Where", [far, self._constant(0.0), scaled])
                parts.append(self._node("Where", [gap, self._constant(0.0), scaled]))
            if scale.missing:
                parts.append(self._node("Cast", [gap], to=TensorProto.DOUBLE))
        for choice in preprocessor.choices:
            self.inputs.append(helper.make_tensor_value_info(choice.name, TensorProto.STRING, [ROWS, 1]))
            if preprocessor.as_codes(choice):
                parts.append(self._codes(choice))
                continue
            levels = [*choice.levels, *([""] if choice.missing else [])]
            flat = self._node("Reshape", [choice.name, self._constant(np.array([-1], dtype=np.int64))])
            spread = self._node("OneHotEncoder", [flat], domain="ai.onnx.ml", cats_strings=levels, zeros=1)
            parts.append(self._node("Cast", [spread], to=TensorProto.DOUBLE))
            if choice.other:
                parts.append(self._other(flat, choice, parts[-1]))
        return self._node("Concat", parts, axis=1)

    def _other(self, flat: str, choice: OneHot, spread: str) -> str:
        """Add the feature of levels that are not listed: 1 where no other feature of the column is, and text is."""
        from onnx import TensorProto

        width = self._constant(np.ones((choice.width - 1, 1)))
        listed = self._node("MatMul", [spread, width])
        gap = self._node("OneHotEncoder", [flat], domain="ai.onnx.ml", cats_strings=[""], zeros=1)
        gap = self._node("Cast", [gap], to=TensorProto.DOUBLE)
        rest = self._node("Sub", [self._constant(np.ones((1, 1))), self._node("Max", [listed, gap])])
        return rest

    def _codes(self, choice: OneHot) -> str:
        """Add the code of a text: its place among the levels, NaN if it is missing or unknown."""
        from onnx import TensorProto

        keys = {
            "keys_strings": list(choice.levels),
            "values_floats": [float(k) for k in range(len(choice.levels))],
        }
        found = self._node(
            "LabelEncoder", [choice.name], domain="ai.onnx.ml", default_float=float("nan"), **keys
        )
        return self._node("Cast", [found], to=TensorProto.DOUBLE)

    def _predictions(self, features: str) -> str:
        module = self.one.module()
        if not isinstance(module, LinearPredictor):
            return self._network(module, features)
        weight = module.linear.weight.detach().numpy()
        flat = self._node("Flatten", [features], axis=1)
        scores = self._node("MatMul", [flat, self._constant(np.ascontiguousarray(weight.T))])
        if module.linear.bias is not None:
            scores = self._node("Add", [scores, self._constant(module.linear.bias.detach().numpy())])
        if self.one.task == "multiclass":
            return self._node("Softmax", [scores], axis=1)
        if self.one.task == "regression":
            return self._node("Squeeze", [scores, self._constant(np.array([1], dtype=np.int64))])
        likely = self._node("Sigmoid", [scores])
        rest = self._node("Sub", [self._constant(np.ones((), dtype=weight.dtype)), likely])
        return self._node("Concat", [rest, likely], axis=1)

    def _network(self, module: torch.nn.Module, features: str) -> str:
        """Add the graph that torch makes of a network, under names of its own."""
        from onnx import compose

        shape = getattr(self.one.model, "features", self.one.features)
        example = torch.zeros(
            2, *(shape if isinstance(shape, tuple) else (shape,)), dtype=self.one.weights.dtype
        )
        graph = compose.add_prefix_graph(_torch_graph(module, example), "network/")
        _forget_sources(graph)
        self._name(features, graph.input[0].name)
        self.nodes.extend(graph.node)
        self.constants.extend(graph.initializer)
        return str(graph.output[0].name)

    def _name(self, old: str, new: str) -> None:
        """Give a value a second name, that of an output or of what torch calls its input."""
        from onnx import helper

        self.nodes.append(helper.make_node("Identity", [old], [new]))

    def _outputs(self, predictions: str, kind: int) -> list[Any]:
        from onnx import TensorProto, helper, numpy_helper

        one, answer = self.one, self._free("prediction")
        if one.task == "regression":
            if one.preprocessor is not None:
                kind = TensorProto.DOUBLE
                value = self._node("Cast", [predictions], to=kind)
                scaled = self._node("Mul", [value, self._constant(one.preprocessor.target_sd)])
                predictions = self._node("Add", [scaled, self._constant(one.preprocessor.target_mean)])
            self._name(predictions, answer)
            return [helper.make_tensor_value_info(answer, kind, [ROWS])]
        likely = self._free("probabilities")
        self._name(predictions, likely)
        number = self._node("ArgMax", [predictions], axis=1, keepdims=0)
        outputs = [helper.make_tensor_value_info(likely, kind, [ROWS, len(one.classes) or None])]
        if not one.classes:
            self._name(number, answer)
            return [*outputs, helper.make_tensor_value_info(answer, TensorProto.INT64, [ROWS])]
        self.constants.append(numpy_helper.from_array(np.array(one.classes, dtype=object), "_classes"))
        self.nodes.append(helper.make_node("Gather", ["_classes", number], [answer], axis=0))
        return [*outputs, helper.make_tensor_value_info(answer, TensorProto.STRING, [ROWS])]

    def _free(self, name: str) -> str:
        """Return the name of an output that no column has."""
        while name in {entry.name for entry in self.inputs}:
            name += "_"
        return name

    def _node(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        from onnx import helper

        output = f"_{len(self.nodes)}_{kind}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _constant(self, value: float | np.ndarray) -> str:
        from onnx import numpy_helper

        name = f"_constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def _forget_sources(graph: Any) -> None:
    """Clear what torch notes of the lines that made each node: paths of the machine that exports."""
    for node in graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _forget_sources(inner)


def _torch_graph(module: torch.nn.Module, example: torch.Tensor) -> Any:
    """Return the graph that torch's exporter makes of the module, for any number of rows."""
    rows = torch.export.Dim(ROWS, min=1)
    loud = logging.getLogger("torch.onnx")
    before = loud.level
    loud.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=({0: rows},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as problem:
        reason = str(problem).strip().splitlines()[0]
        raise SettingError(
            f"torch cannot write this model as ONNX ({reason}). Use --to safetensors."
        ) from None
    finally:
        loud.setLevel(before)
    assert program is not None
    return program.model_proto.graph
