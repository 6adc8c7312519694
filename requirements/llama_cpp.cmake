# Read by the build of llama_cpp_python (CMAKE_PROJECT_llama_cpp_INCLUDE, see conf/toolchain/llama_cpp.yaml).
# Its sdist holds all of llama.cpp, but its wheel only the libraries that Python calls. This adds, from the same
# sources, the server that llama.cpp is really served by and the converter of checkpoints, beside the package.

set(BUILD_SHARED_LIBS ON)

# Everything stays inside the package's own directory.
set(CMAKE_INSTALL_BINDIR llama_cpp/bin CACHE PATH "" FORCE)
set(CMAKE_INSTALL_LIBDIR llama_cpp/lib CACHE PATH "" FORCE)
set(CMAKE_INSTALL_INCLUDEDIR llama_cpp/include CACHE PATH "" FORCE)
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib")

# The server's libraries are targets that the package's own build adds later; CMake looks names up when all are known.
# LLAMA_BUILD_TOOLS would add a dozen more programs, and tools/mtmd a second time.
function(add_llama_server root)
    set(PROJECT_SOURCE_DIR "${root}")
    set(LLAMA_TOOLS_INSTALL ON)
    set(LLAMA_USE_PREBUILT_UI OFF) # nothing is fetched while building; the web page stays empty
    set(LLAMA_BUILD_UI OFF)
    add_subdirectory("${root}/tools/ui")
    add_subdirectory("${root}/tools/server")
endfunction()
add_llama_server("${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp")

# A command of the environment, as the package's other programs would be.
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/llama-server.sh" [=[#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "$here"/../lib/python3*/site-packages/llama_cpp/bin/llama-server "$@"
]=])
install(PROGRAMS "${CMAKE_CURRENT_BINARY_DIR}/llama-server.sh" DESTINATION "${SKBUILD_SCRIPTS_DIR}" RENAME llama-server)

set(CONVERTER "${SKBUILD_PLATLIB_DIR}/llama_cpp/convert")
install(FILES vendor/llama.cpp/convert_hf_to_gguf.py DESTINATION "${CONVERTER}")
install(DIRECTORY vendor/llama.cpp/conversion DESTINATION "${CONVERTER}" FILES_MATCHING PATTERN "*.py")
install(DIRECTORY vendor/llama.cpp/gguf-py/gguf DESTINATION "${CONVERTER}/gguf-py" FILES_MATCHING PATTERN "*.py")
