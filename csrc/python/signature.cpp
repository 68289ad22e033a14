#include "python/signature.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "python/tensor_bridge.h"

namespace pkg::python {
namespace {

bool is_integer(PyObject* value) { return PyLong_CheckExact(value) != 0; }

bool are_integers(PyObject* value) {
  if (!PyTuple_CheckExact(value) && !PyList_CheckExact(value)) {
    return false;
  }
  PyObject** items = PySequence_Fast_ITEMS(value);
  return std::all_of(items, items + PySequence_Fast_GET_SIZE(value),
                     is_integer);
}

ValueType type_of(const std::string& text) {
  static constexpr std::pair<std::string_view, ValueType> kTypes[] = {
      {"Tensor", ValueType::Tensor},         {"float", ValueType::Float},
      {"int", ValueType::Integer},           {"bool", ValueType::Boolean},
      {"SymInt", ValueType::Integer},        {"str", ValueType::Text},
      {"ScalarType", ValueType::Dtype},      {"List[int]", ValueType::Integers},
      {"List[SymInt]", ValueType::Integers},
  };
  for (const auto& [name, type] : kTypes) {
    if (name == text) {
      return type;
    }
  }
  throw std::runtime_error("pkg's operators have no parameters of type " +
                           text);
}

Parameter parameter_of(const py::handle& argument) {
  constexpr std::string_view kOptional = "Optional[";
  auto text = py::str(argument.attr("real_type")).cast<std::string>();
  const bool is_optional = text.starts_with(kOptional);
  if (is_optional) {
    text = text.substr(kOptional.size(), text.size() - kOptional.size() - 1);
  }
  const py::object size = argument.attr("N");
  const py::object alias = argument.attr("alias_info");
  PyObject* name = PyUnicode_InternFromString(
      argument.attr("name").cast<std::string>().c_str());
  const bool has_default = argument.attr("has_default_value")().cast<bool>();
  return {
      py::reinterpret_steal<py::str>(name),
      type_of(text),
      is_optional,
      argument.attr("kwarg_only").cast<bool>(),
      !alias.is_none() && alias.attr("is_write").cast<bool>(),
      size.is_none() ? 0 : size.cast<size_t>(),
      has_default ? py::object(argument.attr("default_value")) : py::object()};
}

// A list whose elements are all alike as one of them, which stands for it.
std::string default_text(const py::object& value) {
  if (py::isinstance<py::list>(value)) {
    const py::list list(value);
    const bool are_alike =
        !list.empty() && std::all_of(list.begin(), list.end(), [&](auto item) {
          return py::reinterpret_borrow<py::object>(item).equal(list[0]);
        });
    if (are_alike) {
      return py::repr(list[0]).cast<std::string>();
    }
  }
  return py::repr(value).cast<std::string>();
}

}  // namespace

bool Parameter::fits(PyObject* value) const {
  if (value == Py_None) {
    return is_optional;
  }
  switch (type) {
    case ValueType::Tensor:
      return TensorBridge::instance().is_tensor(value);
    case ValueType::Float:
      return PyFloat_CheckExact(value) || PyLong_CheckExact(value);
    case ValueType::Integer:
      return is_integer(value);
    case ValueType::Boolean:
      return PyBool_Check(value);
    case ValueType::Text:
      return PyUnicode_CheckExact(value);
    case ValueType::Dtype:
      return TensorBridge::instance().dtype_of_object(value).has_value();
    case ValueType::Integers:
      return is_integer(value) || are_integers(value);
  }
  return false;
}

std::string Parameter::description() const {
  const auto of_type = [&]() -> std::string {
    switch (type) {
      case ValueType::Tensor:
        return "a torch.Tensor";
      case ValueType::Float:
        return "a float";
      case ValueType::Integer:
        return "an int";
      case ValueType::Boolean:
        return "a bool";
      case ValueType::Text:
        return "a str";
      case ValueType::Dtype:
        return "a torch.dtype";
      case ValueType::Integers:
        return "an int or a sequence of " + std::to_string(list_size) + " ints";
    }
    return "";
  };
  return of_type() + (is_optional ? " or None" : "");
}

Signature::Signature(std::string name, const py::object& schema)
    : name_(std::move(name)) {
  for (const py::handle& argument : schema.attr("arguments")) {
    parameters_.push_back(parameter_of(argument));
    positional_ += parameters_.back().is_keyword_only ? 0 : 1;
    writes_ = writes_ || parameters_.back().is_written;
  }
  if (parameters_.size() > kMaxArguments) {
    throw std::runtime_error(name_ +
                             " has more parameters than a call from "
                             "Python passes; raise kMaxArguments");
  }
  py::list keywords;
  for (size_t i = positional_; i < parameters_.size(); ++i) {
    keywords.append(parameters_[i].name);
  }
  keywords_ = py::tuple(keywords);
}

size_t Signature::index_of(PyObject* name) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].name.ptr() == name) {  // interned, as in most calls
      return i;
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (PyUnicode_Compare(parameters_[i].name.ptr(), name) == 0) {
      return i;
    }
  }
  return parameters_.size();
}

std::optional<Signature::Values> Signature::bind(PyObject* const* arguments,
                                                 size_t positional,
                                                 PyObject* names) const {
  if (positional > positional_) {
    PyErr_Format(PyExc_TypeError,
                 "%s() takes at most %zu positional argument%s but %zu were "
                 "given",
                 name_.c_str(), positional_, positional_ == 1 ? "" : "s",
                 positional);
    return std::nullopt;
  }
  Values values{};
  std::copy_n(arguments, positional, values.begin());
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    const size_t index = index_of(name);
    const bool is_known = index < parameters_.size();
    if (!is_known || values[index] != nullptr) {
      PyErr_Format(PyExc_TypeError,
                   is_known ? "%s() got multiple values for argument '%U'"
                            : "%s() got an unexpected keyword argument '%U'",
                   name_.c_str(), name);
      return std::nullopt;
    }
    values[index] = arguments[positional + static_cast<size_t>(i)];
  }
  bool is_whole = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (values[i] == nullptr) {
      values[i] = parameters_[i].default_value.ptr();
      is_whole = is_whole && values[i] != nullptr;
    }
  }
  if (!is_whole) {
    refuse_missing(values);
    return std::nullopt;
  }
  return values;
}

void Signature::refuse_missing(const Values& values) const {
  std::string missing;
  size_t count = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (values[i] == nullptr) {
      missing += (count++ == 0 ? "'" : ", '") +
                 parameters_[i].name.cast<std::string>() + "'";
    }
  }
  PyErr_Format(PyExc_TypeError, "%s() missing required argument%s: %s",
               name_.c_str(), count == 1 ? "" : "s", missing.c_str());
}

std::string Signature::text() const {
  std::string text = name_ + "(";
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    text += i == 0 ? "" : ", ";
    text += i == positional_ ? "*, " : "";
    text += parameter.name.cast<std::string>();
    if (parameter.default_value) {
      text += "=" + default_text(parameter.default_value);
    }
  }
  return text + ")";
}

}  // namespace pkg::python
