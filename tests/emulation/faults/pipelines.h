// Cases of kernels that copy and multiply asynchronously.
#pragma once

#include <functional>
#include <map>
#include <string>

std::map<std::string, std::function<void()>> pipeline_cases();
std::map<std::string, std::function<void()>> bulk_copy_cases();
