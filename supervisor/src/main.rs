//! The `tollgate` command.

fn main() -> std::process::ExitCode {
    tollgate::cli::main()
}
