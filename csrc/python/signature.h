// An operator's parameters, as its registered schema has them: what a call from
// Python is bound to.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "python/pybind_headers.h"

namespace pkg::python {

namespace py = pybind11;

inline constexpr size_t kMaxArguments = 20;

enum class ValueType { Tensor, Float, Integer, Boolean, Text, Dtype, Integers };

struct Parameter {
  py::str name;
  ValueType type;
  bool is_optional;
  bool is_keyword_only;
  bool is_written;           // of Tensor: the operator writes to it
  size_t list_size;          // of Integers; one number stands for so many
  py::object default_value;  // null where an argument is required

  // Whether the value is of the very type. What is not may still be taken by
  // PyTorch, as a symbolic number or a NumPy scalar is.
  bool fits(PyObject* value) const;

  // "a torch.Tensor", "an int or None": what a value must be.
  std::string description() const;
};

class Signature {
 public:
  // Borrowed references, one for each parameter.
  using Values = std::array<PyObject*, kMaxArguments>;

  // Reads the schema of torch.ops.<namespace>.<name>.default.
  Signature(std::string name, const py::object& schema);

  const std::string& name() const { return name_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  size_t size() const { return parameters_.size(); }
  // How many may be given by position; the others, keywords(), follow them.
  size_t positional() const { return positional_; }
  PyObject* keywords() const { return keywords_.ptr(); }

  // Whether the operator writes to an argument.
  bool writes() const { return writes_; }

  // The arguments of a vectorcall in the order of the parameters, defaults
  // filled in; otherwise nothing, with Python's own TypeError set.
  std::optional<Values> bind(PyObject* const* arguments, size_t positional,
                             PyObject* names) const;

  // "name(a, b, *, c=None)", which inspect.signature understands in a
  // docstring.
  std::string text() const;

 private:
  size_t index_of(PyObject* name) const;
  void refuse_missing(const Values& values) const;

  std::string name_;
  std::vector<Parameter> parameters_;
  size_t positional_ = 0;
  bool writes_ = false;
  py::tuple keywords_;
};

}  // namespace pkg::python
