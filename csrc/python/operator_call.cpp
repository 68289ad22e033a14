#include "python/operator_call.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "python/interpreter_lock.h"
#include "python/numbers.h"
#include "python/tensor_bridge.h"
#include "python/thread_state.h"

namespace pkg::python {
namespace {

const TensorView* view_of(const DirectArgument& argument) {
  const TensorView* writable = std::get_if<WritableView>(&argument);
  return writable != nullptr ? writable : std::get_if<TensorView>(&argument);
}

// Whether a call is done before the lock would be of use to another thread.
bool is_short(const DirectArgument* arguments, size_t count) {
  int64_t elements = 0;
  for (size_t i = 0; i < count; ++i) {
    if (const TensorView* view = view_of(arguments[i])) {
      elements += product(view->sizes);
    } else if (std::holds_alternative<IntegerList>(arguments[i])) {
      return false;  // of sizes, which may ask for any number of results
    }
  }
  return elements <= kFewElements;
}

// Tells observers that follow every operator of one.
class ObservedCall {
 public:
  explicit ObservedCall(const char* name) {
    aoti_record_function_start(name, nullptr, nullptr, 0, &handle_);
  }
  ~ObservedCall() { aoti_record_function_end(handle_); }
  ObservedCall(const ObservedCall&) = delete;
  ObservedCall& operator=(const ObservedCall&) = delete;

 private:
  AtenRecordFunctionHandle handle_ = nullptr;
};

std::optional<int64_t> integer_of(PyObject* value) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0 ? std::optional(number) : std::nullopt;
}

std::optional<IntegerList> integers_of(PyObject* value, size_t count) {
  IntegerList list;
  if (PyLong_CheckExact(value)) {
    const auto number = integer_of(value);
    if (!number || count > IntegerList::kMost) {
      return std::nullopt;
    }
    std::fill_n(list.values.begin(), count, *number);
    list.count = count;
    return list;
  }
  const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(value));
  if (size > IntegerList::kMost) {
    return std::nullopt;
  }
  for (; list.count < size; ++list.count) {
    const auto number = integer_of(PySequence_Fast_GET_ITEM(value, list.count));
    if (!number) {
      return std::nullopt;
    }
    list.values[list.count] = *number;
  }
  return list;
}

// A value that fits the parameter, as a kernel takes it; false for what none
// takes.
bool convert(PyObject* value, const Parameter& parameter,
             DirectArgument& argument) {
  const auto assign = [&](const auto& converted) {
    if (converted) {
      argument = *converted;
    }
    return converted.has_value();
  };
  if (value == Py_None) {
    argument = std::monostate{};
    return true;
  }
  switch (parameter.type) {
    case ValueType::Tensor:
      return parameter.is_written
                 ? assign(ThreadState::instance().memory_to_write_of(value))
                 : assign(ThreadState::instance().memory_of(value));
    case ValueType::Float:
      return assign(
          number_of(value));  // the dispatcher tells what is too large
    case ValueType::Integer:
      return assign(integer_of(value));
    case ValueType::Boolean:
      argument = value == Py_True;
      return true;
    case ValueType::Text: {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &length);
      if (text == nullptr) {
        PyErr_Clear();
        return false;
      }
      argument = std::string_view(text, static_cast<size_t>(length));
      return true;
    }
    case ValueType::Dtype: {
      const auto dtype = TensorBridge::instance().dtype_of_object(value);
      argument = *dtype;
      return *dtype != ScalarType::Undefined;
    }
    case ValueType::Integers:
      return assign(integers_of(value, parameter.list_size));
  }
  return false;
}

PyObject* object_of(const Tensor& tensor) {
  return TensorBridge::instance().object_of(tensor.get());
}

// Arguments with a list where a number stands for one, as PyTorch's dispatcher
// and all that it calls want them.
class ListedArguments {
 public:
  ListedArguments(const Signature& signature, PyObject* const* values) {
    size_t count = 0;
    for (const Parameter& parameter : signature.parameters()) {
      arguments_[count] = values[count];
      if (parameter.type == ValueType::Integers &&
          !PySequence_Check(values[count])) {
        py::list list;
        for (size_t i = 0; i < parameter.list_size; ++i) {
          list.append(py::handle(values[count]));
        }
        arguments_[count] = list.ptr();
        lists_.push_back(std::move(list));
      }
      ++count;
    }
  }

  PyObject* const* data() const { return arguments_.data(); }

 private:
  std::array<PyObject*, kMaxArguments> arguments_;
  std::vector<py::object> lists_;
};

// A function of pkg/_refusals.py.
py::object refusal(const char* name) {
  return py::module_::import("pkg._refusals").attr(name);
}

}  // namespace

PyObject* OperatorCall::operator()(PyObject* const* values) const {
  const auto& state = ThreadState::instance();
  if (kernel == nullptr || !are_plain(values)) {
    return long_way(values);
  }
  const bool may_be_observed =
      (is_checked || !observed_as.empty()) && state.may_be_observed();
  if (is_checked) {
    if (!state.is_plain(has_autocast, may_be_observed)) {
      return long_way(values);
    }
    if (needs_gradient(values)) {
      return record && state.is_autograd_on() && are_past_autocast(values)
                 ? call_record(values)
                 : long_way(values);
    }
  }
  PyObject* result = run(values, may_be_observed);
  return result != nullptr || PyErr_Occurred() != nullptr
             ? result
             : other_way(values, may_be_observed);
}

PyObject* OperatorCall::call_record(PyObject* const* values) const {
  const ListedArguments listed(*signature, values);
  PyObject* result = PyObject_Vectorcall(record.ptr(), listed.data(),
                                         signature->size(), nullptr);
  if (result == nullptr && !otherwise) {
    explain(values);
  }
  return result;
}

// Where the thread is plain and the kernel does not take the values. The
// dispatcher tells observers of no call that begins below its first key.
PyObject* OperatorCall::other_way(PyObject* const* values,
                                  bool may_be_observed) const {
  if (!may_be_observed &&
      below_autograd.takes(*signature, values, has_autocast)) {
    PyObject* result = below_autograd.call(
        *signature, ListedArguments(*signature, values).data());
    if (result != nullptr) {
      return result;
    }
    PyErr_Clear();  // the kernel is asked again, and refuses in words
  }
  return long_way(values);
}

// Of the types that the schema has, and the tensors of no subclass: one does as
// it likes.
bool OperatorCall::are_plain(PyObject* const* values) const {
  const auto& state = ThreadState::instance();
  for (const Parameter& parameter : signature->parameters()) {
    PyObject* value = *values++;
    if (!(parameter.type == ValueType::Tensor && value != Py_None
              ? state.is_plain_type(value)
              : parameter.fits(value))) {
      return false;
    }
  }
  return true;
}

bool OperatorCall::needs_gradient(PyObject* const* values) const {
  const auto& state = ThreadState::instance();
  if (!aoti_torch_grad_mode_is_enabled()) {
    return false;
  }
  for (const Parameter& parameter : signature->parameters()) {
    PyObject* value = *values++;
    if (parameter.type == ValueType::Tensor && value != Py_None &&
        state.requires_gradient(value)) {
      return true;
    }
  }
  return false;
}

// Whether no autocast has a say in the call: what records a gradient calls the
// operator past autocast, of every device. That of the CPU is known to be off
// where it would; each device has its own, and one that is not known may be on.
bool OperatorCall::are_past_autocast(PyObject* const* values) const {
  if (!has_autocast) {
    return true;
  }
  const auto& state = ThreadState::instance();
  bool are_on_cpu = true;
  for (const Parameter& parameter : signature->parameters()) {
    PyObject* value = *values++;
    if (parameter.type == ValueType::Tensor && value != Py_None &&
        !state.is_on_cpu(value)) {
      if (!below_autograd.is_of_device(value)) {
        return false;
      }
      are_on_cpu = false;
    }
  }
  return are_on_cpu || below_autograd.is_thread_plain(has_autocast);
}

PyObject* OperatorCall::run(PyObject* const* values,
                            bool may_be_observed) const {
  std::array<DirectArgument, kMaxArguments> arguments;
  DirectResults results;
  // What is written to comes first: it may move to memory of its own, and be
  // another argument too.
  if ((signature->writes() && !convert_all(values, true, arguments.data())) ||
      !convert_all(values, false, arguments.data()) ||
      !enter(arguments.data(), results, may_be_observed) ||
      (signature->writes() && !count_writes(values))) {
    return nullptr;
  }
  return results[1]   ? TensorBridge::instance().tuple_of(results)
         : results[0] ? object_of(*results[0])
                      : Py_NewRef(Py_None);
}

// Those that are written to, or the others.
bool OperatorCall::convert_all(PyObject* const* values, bool are_written,
                               DirectArgument* arguments) const {
  size_t i = 0;
  for (const Parameter& parameter : signature->parameters()) {
    if (parameter.is_written == are_written &&
        !convert(values[i], parameter, arguments[i])) {
      return false;
    }
    ++i;
  }
  return true;
}

// False with Python's error set.
bool OperatorCall::count_writes(PyObject* const* values) const {
  for (const Parameter& parameter : signature->parameters()) {
    PyObject* value = *values++;
    if (parameter.is_written && value != Py_None &&
        !ThreadState::instance().count_write(value)) {
      return false;
    }
  }
  return true;
}

// False where the kernel refuses.
bool OperatorCall::enter(const DirectArgument* arguments,
                         DirectResults& results, bool may_be_observed) const {
  const bool is_told = may_be_observed && !observed_as.empty();
  // An observer may wait for what another thread of Python holds.
  const ReleasedLock released(is_told ||
                              !is_short(arguments, signature->size()));
  try {
    std::optional<ObservedCall> observed;
    if (is_told) {
      observed.emplace(observed_as.c_str());
    }
    return kernel(arguments, signature->size(), results);
  } catch (const std::exception&) {
    return false;
  }
}

PyObject* OperatorCall::long_way(PyObject* const* values) const {
  if (otherwise) {
    return PyObject_Vectorcall(otherwise.ptr(), values, signature->size(),
                               nullptr);
  }
  if (are_refused(values)) {
    return nullptr;
  }
  PyObject* result = dispatch(values);
  if (result == nullptr) {
    explain(values);
  }
  return result;
}

// Through torch.ops.
PyObject* OperatorCall::dispatch(PyObject* const* values) const {
  const ListedArguments listed(*signature, values);
  return PyObject_Vectorcall(dispatched.ptr(), listed.data(),
                             signature->positional(), signature->keywords());
}

// Whether a value is of a type that the operator does not take; the error that
// says so is set then.
bool OperatorCall::are_refused(PyObject* const* values) const {
  size_t i = 0;
  for (const Parameter& parameter : signature->parameters()) {
    if (!parameter.fits(values[i])) {
      try {
        refusal("check_type")(signature->name(), parameter.name,
                              parameter.description(), py::handle(values[i]));
      } catch (py::error_already_set& error) {
        error.restore();
        return true;
      }
    }
    ++i;
  }
  return false;
}

// Puts an error in the place of PyTorch's where that does not say what is wrong
// with which argument.
void OperatorCall::explain(PyObject* const* values) const {
  py::error_already_set theirs;
  try {
    py::dict named;
    for (const Parameter& parameter : signature->parameters()) {
      named[parameter.name] = py::handle(*values++);
    }
    refusal("explain")(signature->name(), named, theirs.value());
    theirs.restore();
  } catch (py::error_already_set& ours) {
    ours.restore();
  }
}

}  // namespace pkg::python
