//! The `tollgate-shim` program: builds the jail from within and is its pid 1; as `tollgate`, the jail's own client.

use tollgate_shim::{jail, protocol};

fn main() -> std::process::ExitCode {
    let mut arguments = std::env::args_os();
    let called_as = arguments.next().unwrap_or_default();
    let first = arguments.next().unwrap_or_default();
    if first == "--inside" {
        jail::inside_main(jail::adopt(protocol::CONTROL_FD));
    }
    if first == "--outer" {
        jail::outer_main(jail::adopt_standard_input());
    }
    let name = std::path::Path::new(&called_as).file_name().unwrap_or_default().to_string_lossy().into_owned();
    eprintln!("{name}: this program is started by `tollgate run`; it does nothing by itself");
    std::process::ExitCode::from(2)
}
