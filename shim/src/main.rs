//! The `tollgate-shim` program: builds the jail from within and is its pid 1; as `tollgate`, the jail's own client.

use std::{ffi::OsStr, path::Path, process::ExitCode};
use tollgate_shim::{client, jail, protocol};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let called_as = arguments.next().unwrap_or_default();
    let arguments: Vec<_> = arguments.collect();
    match arguments.first().and_then(|first| first.to_str()) {
        Some("--outer") => jail::outer_main(jail::adopt_standard_input()),
        Some("--inside") => jail::inside_main(jail::adopt(protocol::CONTROL_FD), &arguments[1..]),
        Some("--version") => {
            println!("tollgate-shim {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        _ if Path::new(&called_as).file_name() == Some(OsStr::new("tollgate")) => client::main(arguments),
        _ => {
            eprintln!("tollgate-shim: this program is started by `tollgate run`; it does nothing by itself");
            ExitCode::from(2)
        }
    }
}
