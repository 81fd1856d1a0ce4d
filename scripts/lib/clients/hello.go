// A static program with its own resolver and its own TLS: it asks for each address given and prints what came.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	for _, url := range os.Args[1:] {
		response, err := http.Get(url)
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		body, err := io.ReadAll(response.Body)
		fmt.Println(response.Proto, response.StatusCode, response.Header.Get("Retry-After"))
		fmt.Print(string(body))
		if err != nil || response.StatusCode != 200 {
			fmt.Println(err)
			os.Exit(1)
		}
	}
}
